"""Keys and values of the tokens a generation has seen, so that a step computes only the new ones."""

from __future__ import annotations

import torch


class KVCache:
    """The cache of one batch on one stage, for inference only. All rows hold the same number of tokens.

    Hand the same object to `Decoder.forward` with the prompt first, then with each step's tokens. Each block's buffers
    are allocated at its first use, in its own shape, dtype and device.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self.max_num_tokens = max_num_tokens
        self.num_tokens = 0
        self._keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer_index: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a block's keys and values of S new tokens; return all so far, as views of (B, G, num_tokens + S, D).

        G counts key/value heads. Raises ValueError when the cache is full, or when gradients are asked for.
        """
        if k_BGSD.requires_grad:
            raise ValueError("the key/value cache is for inference: call the decoder under torch.no_grad()")
        end = self.num_tokens + k_BGSD.shape[2]
        if end > self.max_num_tokens:
            raise ValueError(f"the key/value cache holds {self.max_num_tokens} tokens, not {end}")
        if layer_index not in self._keys_values:
            batch_size, num_groups, _, head_dim = k_BGSD.shape
            shape = (batch_size, num_groups, self.max_num_tokens, head_dim)
            self._keys_values[layer_index] = (k_BGSD.new_empty(shape), v_BGSD.new_empty(shape))
        keys, values = self._keys_values[layer_index]
        keys[:, :, self.num_tokens : end] = k_BGSD
        values[:, :, self.num_tokens : end] = v_BGSD
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every block has stored."""
        self.num_tokens += num_tokens
