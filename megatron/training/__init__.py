"""The loop and what surrounds it: setup, evaluation, signals, the state of a run."""
