"""The decoder and its loss as one module: what the engine trains."""

from __future__ import annotations

import torch

from megatron.data.micro_batch import MicroBatch
from megatron.model.decoder import Decoder
from megatron.model.loss import lm_loss
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel


class LanguageModel(torch.nn.Module):
    """Maps a micro-batch to its mean next-token loss, in nats a token; shape (), fp32."""

    def __init__(self, decoder: Decoder, tensor_parallel: TensorParallel = NOT_SPLIT) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.decoder = decoder

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the mean loss over the tokens whose mask is 1."""
        logits_BSV = self.decoder(micro_batch.tokens_BS)
        return lm_loss(
            logits_BSV, micro_batch.labels_BS, micro_batch.loss_mask_BS, tensor_parallel=self.tensor_parallel
        )
