"""The loop and what surrounds it: setup, evaluation, signals, the state of a run."""

import os

import torch

# DeepSpeed, imported by the modules below, would look for an accelerator by itself and warn when it finds none. What
# torch computes on is what it must use.
_accelerator = torch.accelerator.current_accelerator()
os.environ["DS_ACCELERATOR"] = "cpu" if _accelerator is None else _accelerator.type
