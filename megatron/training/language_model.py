"""A stage's decoder layers and the loss as one module: what the engine trains."""

from __future__ import annotations

import torch

from megatron.data.micro_batch import MicroBatch
from megatron.model.decoder import Decoder
from megatron.model.loss import lm_loss
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel


class LanguageModel(torch.nn.Module):
    """Maps a micro-batch to its mean next-token loss, in nats a token; shape (), fp32.

    That is with the whole decoder. With one stage's layers it is a `StageModule`, whose pieces the engine calls.
    """

    def __init__(self, decoder: Decoder, tensor_parallel: TensorParallel = NOT_SPLIT) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.decoder = decoder

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the mean loss over the tokens whose mask is 1."""
        tokens_BS, targets = self.split(micro_batch)
        return self.loss(self.decoder(tokens_BS), targets)

    @property
    def stage(self) -> Decoder:
        """The layers alone."""
        return self.decoder

    def split(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the tokens, and labels and mask."""
        return micro_batch.tokens_BS, (micro_batch.labels_BS, micro_batch.loss_mask_BS)

    def loss(self, logits_BSV: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the mean loss over the tokens whose mask is 1."""
        labels_BS, loss_mask_BS = targets
        return lm_loss(logits_BSV, labels_BS, loss_mask_BS, tensor_parallel=self.tensor_parallel)

    def synthetic_input(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the tokens, or random activations where another stage turns them into such."""
        return self.decoder.synthetic_input(micro_batch.tokens_BS)
