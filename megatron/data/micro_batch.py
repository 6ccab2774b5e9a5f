"""What one micro-batch is, and how samples become one."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class MicroBatch(NamedTuple):
    """Inputs and targets of one micro-batch (B samples of S tokens).

    tokens_BS: int64, what the model reads
    labels_BS: int64, the token after each
    loss_mask_BS: float32, 1 where the prediction counts in the loss
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch on `device`; asynchronous from pinned memory."""
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def pin_memory(self) -> "MicroBatch":
        """The same micro-batch in page-locked memory, from which an accelerator copies by itself."""
        return MicroBatch(*(tensor.pin_memory() for tensor in self))


@dataclass(frozen=True)
class Collate:
    """Makes a `MicroBatch` of samples of seq_length + 1 tokens.

    With `masked_input_token` set, the prediction after each of these tokens does not count (`eod_mask_loss`: what
    follows the end of a document is another document).
    """

    masked_input_token: int | None = None

    def __call__(self, samples: NDArray[np.int64]) -> MicroBatch:
        """`samples`: int64 [B, S + 1]."""
        stacked = torch.from_numpy(samples)
        tokens_BS, labels_BS = stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
        loss_mask_BS = torch.ones(tokens_BS.shape, dtype=torch.float32)
        if self.masked_input_token is not None:
            loss_mask_BS[tokens_BS == self.masked_input_token] = 0.0
        return MicroBatch(tokens_BS, labels_BS, loss_mask_BS)
