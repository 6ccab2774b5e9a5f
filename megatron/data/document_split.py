"""Which documents train, validate and test: a `split` like '969, 30, 1' turned into boundaries between documents."""

import itertools
import math
from fractions import Fraction

from megatron.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(split: str) -> tuple[Fraction, Fraction, Fraction]:
    """The three shares of a comma-separated `split`, exact and summing to 1; missing ones are 0.

    Raises `ConfigError` for anything but one to three numbers >= 0, not all of them 0.
    """
    fields = [field.strip() for field in split.split(",")]
    try:
        shares = [Fraction(field) for field in fields]
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"split '{split}': {error}; expected numbers like '969, 30, 1'") from error
    if len(shares) > 3:
        raise ConfigError(f"split '{split}' has {len(shares)} numbers; at most three: train, valid, test")
    if min(shares) < 0 or not sum(shares):
        raise ConfigError(f"split '{split}': shares must not be negative and not all zero")
    shares += [Fraction(0)] * (3 - len(shares))
    total = sum(shares)
    train, valid, test = (share / total for share in shares)
    return train, valid, test


def split_boundaries(num_documents: int, split: str) -> tuple[int, int, int, int]:
    """Boundaries b with 0 = b[0] <= b[1] <= b[2] <= b[3] = num_documents: documents b[i] .. b[i + 1] - 1 are split i.

    Boundaries are the cumulated shares, rounded half up. A share that is not zero then gets at least one document,
    taken from the largest split; where there are fewer documents than such shares, train comes before valid before
    test. A share of zero gets none. Raises `ConfigError` as `parse_split`.
    """
    shares = parse_split(split)
    ends = [math.floor(end * num_documents + Fraction(1, 2)) for end in itertools.accumulate(shares)]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    wanted = [i for i, share in enumerate(shares) if share]
    if num_documents < len(wanted):
        counts = [int(i in wanted[:num_documents]) for i in range(3)]
        wanted = wanted[:num_documents]
    for i in wanted:
        if not counts[i]:
            counts[counts.index(max(counts))] -= 1
            counts[i] += 1
    first, second, third = itertools.accumulate(counts)
    return 0, first, second, third
