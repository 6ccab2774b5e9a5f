"""Token samples made on the spot, for smoke runs and benchmarks that need no data on disk."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray


class SyntheticDataset:
    """`num_samples` samples of seq_length + 1 tokens, each made from (seed, its number) alone.

    'random': independent uniform ids; the loss of any model stays at ln(vocab_size).
    'learnable': after every id its successor, fixed by the seed, nine times in ten and a uniform id otherwise; the best
    loss is about 0.1 ln(vocab_size) + 0.33.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        seq_length: int,
        vocab_size: int,
        seed: int,
        kind: Literal["random", "learnable"] = "learnable",
    ) -> None:
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.seed = seed
        self._successors = None if kind == "random" else np.random.RandomState(_key(seed, 0)).permutation(vocab_size)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """Tokens of sample `sample`, int64 [seq_length + 1]. Raises `IndexError` behind the end."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples}")
        random = np.random.RandomState(_key(self.seed, sample + 1))
        tokens = random.randint(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)
        if self._successors is not None:
            follows = random.random_sample(self.seq_length) < 0.9
            for position in np.flatnonzero(follows):
                tokens[position + 1] = self._successors[tokens[position]]
        return tokens


def _key(seed: int, number: int) -> list[int]:
    return [seed & 0xFFFFFFFF, number & 0xFFFFFFFF, number >> 32]
