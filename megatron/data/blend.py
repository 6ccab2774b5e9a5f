"""Several data sets read as one, in proportions given by weights, with no table: each sample's source is computed.

The sources are the leaves of a binary tree, built as Huffman's (the two lightest first). At an inner node whose left
side has the share p of its weight, the first n samples of the node hold floor(n * p + 1/2) of the left side, in exact
rational arithmetic. So the source of sample n, and its place in that source, follow from n in a few integer
operations for each level: nothing is stored, and the blend of the first n samples does not depend on how many follow.

Error bound: a node's count is off by at most 1/2 against its parent's exact share, and in a Huffman tree an inner node
has at most 2/3 of its parent's weight, so errors do not pile up: 1/2 + 1/2 * 2/3 + ... <= 3/2 at an inner node. Every
prefix holds every source's share to within 2 samples; the worst seen over hundreds of random blends is 1.2.
"""

import heapq
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megatron.data.gpt_dataset import TokenDataset
from megatron.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Node:
    """`left` of `total` samples go to the left side."""

    left: int
    total: int
    sides: tuple["_Node | int", "_Node | int"]

    def left_count(self, num_samples: int) -> int:
        return (2 * num_samples * self.left + self.total) // (2 * self.total)


@dataclass(frozen=True)
class Blend:
    """A deterministic interleaving of `num_sources` sources. See the module for how, and how exact, it is.

    The last `len(late)` of the `num_samples` samples belong to the sources in `late`, one each: sources with a positive
    weight so small that the tree gives them none.
    """

    root: _Node | int
    num_sources: int
    num_samples: int
    late: tuple[int, ...] = ()

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, place in that source) of sample 0 <= `sample` < num_samples."""
        if sample >= self.num_samples - len(self.late):
            return self.late[sample - self.num_samples], 0
        node = self.root
        while isinstance(node, _Node):
            before = node.left_count(sample)
            if node.left_count(sample + 1) > before:
                node, sample = node.sides[0], before
            else:
                node, sample = node.sides[1], sample - before
        return node, sample

    def counts(self) -> list[int]:
        """Samples each source contributes; their sum is num_samples."""
        counts = [0] * self.num_sources
        _count(self.root, self.num_samples - len(self.late), counts)
        for source in self.late:
            counts[source] += 1
        return counts


def _count(node: _Node | int, num_samples: int, counts: list[int]) -> None:
    if isinstance(node, _Node):
        left = node.left_count(num_samples)
        _count(node.sides[0], left, counts)
        _count(node.sides[1], num_samples - left, counts)
    else:
        counts[node] = num_samples


def make_blend(weights: Sequence[float], num_samples: int, names: Sequence[str]) -> Blend:
    """A blend of sources in proportion to `weights`, which need not sum to 1; a weight of zero leaves a source out.

    A source with a positive weight gets at least one sample, and a warning where that is more than its share; with
    fewer samples than sources the lightest go without, which is warned of too. Raises `ConfigError` for weights that
    are negative, not finite or all zero, or as many as there are no `names`.
    """
    exact = _exact_weights(weights, names)
    root = _huffman_tree(exact)
    enough = num_samples >= np.count_nonzero(weights)
    late: tuple[int, ...] = ()
    while starved := _without_samples(Blend(root, len(exact), num_samples, late), exact):
        for source in starved:
            what = f"data set '{names[source]}': weight {weights[source]:g} of {sum(weights):g}"
            result = "is given one" if enough else "gets none"
            logger.warning("%s is less than one of %d samples; it %s", what, num_samples, result)
        if not enough:
            break
        late += starved
    return Blend(root, len(exact), num_samples, late)


def _without_samples(blend: Blend, weights: Sequence[Fraction]) -> tuple[int, ...]:
    counts = blend.counts()
    return tuple(source for source, weight in enumerate(weights) if weight and not counts[source])


def weights_by_num_documents(num_documents: Sequence[int], alpha: float) -> list[float]:
    """Weights proportional to num_documents ** alpha (multinomial sampling as in XLM-R, arXiv:1911.02116, section 3.1).

    alpha 1 keeps the natural proportions, alpha towards 0 makes all sources equal. An empty source gets weight 0
    beside others that are not.
    """
    total = sum(num_documents)
    if not total:
        return [1.0] * len(num_documents)
    powers = [(count / total) ** alpha if count else 0.0 for count in num_documents]
    return [power / sum(powers) for power in powers]


class BlendedDataset:
    """Several data sets interleaved by a `Blend`."""

    def __init__(self, datasets: Sequence[TokenDataset | None], blend: Blend) -> None:
        """`datasets[i]` is source i; None where the blend takes nothing from it."""
        self.datasets = list(datasets)
        self.blend = blend

    def __len__(self) -> int:
        return self.blend.num_samples

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """Tokens of sample `sample` of the blend, int64 [seq_length + 1]. Raises `IndexError` behind the end."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        source, place = self.blend.locate(sample)
        dataset = self.datasets[source]
        assert dataset is not None
        return dataset[place]


def _exact_weights(weights: Sequence[float], names: Sequence[str]) -> list[Fraction]:
    if len(weights) != len(names):
        raise ConfigError(f"{len(weights)} weights for {len(names)} data sets ({', '.join(names)})")
    for weight, name in zip(weights, names, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"the weight of data set '{name}' is {weight}; it must be a finite number >= 0")
    if not any(weights):
        raise ConfigError(f"all weights of the data sets {', '.join(names)} are zero")
    # The shortest decimal that reads back as the same float: 0.3 means three tenths, not 5404319552844595 / 2**54.
    return [Fraction(repr(float(weight))) for weight in weights]


def _huffman_tree(weights: Sequence[Fraction]) -> _Node | int:
    heap: list[tuple[Fraction, int, _Node | int]] = [(w, i, i) for i, w in enumerate(weights) if w]
    heapq.heapify(heap)
    tie_breaker = len(weights)
    while len(heap) > 1:
        (light, _, left), (heavy, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        share = light / (light + heavy)
        heapq.heappush(heap, (light + heavy, tie_breaker, _Node(share.numerator, share.denominator, (left, right))))
        tie_breaker += 1
    return heap[0][2]
