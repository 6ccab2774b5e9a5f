"""The layout of Megatron's memory-mapped token files, as megatron-core's `IndexedDataset` writes them.

`<prefix>.bin` holds the token ids of all sequences, one after the other, in one integer type. `<prefix>.idx`, little
endian:

    9 bytes   the magic MMIDIDX\\0\\0
    uint64    version, 1
    uint8     code of the token type (`TOKEN_DTYPES`)
    uint64    number of sequences N
    uint64    number of document boundaries M, one more than documents
    int32[N]  tokens in each sequence
    int64[N]  where each sequence starts in .bin, in bytes
    int64[M]  the sequence each document starts with; the last entry is N

Multimodal files append int8[N]; they are refused.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<QBQQ")
HEADER_BYTES = len(MAGIC) + HEADER.size

# Codes 6 and 7 are the two floating types (in an order that differs between trainers): never token ids.
TOKEN_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}

# What other writers of .idx files start with, so that the message can say what it found.
_OTHER_MAGICS = {
    b"TNTIDX\x00\x00": "the older 'lazy'/'cached' format",
    b"PK": "a zip or npz archive",
    b"\x1f\x8b": "gzip",
}


def dtype_for_vocab(vocab_size: int) -> np.dtype:
    """The smallest of the two usual token types that holds the ids 0 .. vocab_size - 1.

    Megatron-core leaves uint16 already at 65,500; either width is read back by either side, so the exact bound is used.
    """
    return TOKEN_DTYPES[8] if vocab_size <= 1 << 16 else TOKEN_DTYPES[4]


def code_of_dtype(dtype: np.dtype) -> int:
    """The code the index stores for `dtype`. Raises `DataError` for a type that cannot hold token ids."""
    for code, known in TOKEN_DTYPES.items():
        if known == dtype:
            return code
    raise DataError(f"token ids cannot be stored as {dtype}; known are {', '.join(map(str, TOKEN_DTYPES.values()))}")


def index_path(prefix: str | Path) -> Path:
    """`<prefix>.idx`."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    """`<prefix>.bin`."""
    return Path(f"{prefix}.bin")


def clean_prefix(path: str | Path) -> str:
    """The common prefix of the two files of a data set; `x.bin` and `x.idx` are taken as `x`.

    Raises `DataError` when the files are not there, naming what is there instead.
    """
    text = str(path)
    if not index_path(text).exists() and text.endswith((".bin", ".idx")):
        text = text[:-4]
    missing = [str(p) for p in (index_path(text), tokens_path(text)) if not p.is_file()]
    if missing:
        raise DataError(_missing_message(text, missing))
    return text


def _missing_message(prefix: str, missing: list[str]) -> str:
    message = f"data set '{prefix}': {' and '.join(missing)} {'does' if len(missing) == 1 else 'do'} not exist"
    if "," in prefix:
        return f"{message}; one path was expected, give several as a list in train_data_paths"
    folder = Path(prefix)
    if folder.is_dir():
        found = sorted(p.stem for p in folder.glob("*.idx"))
        there = f"it holds {', '.join(found)}" if found else "it holds no .idx file"
        return f"{message}; '{prefix}' is a directory ({there}), the path is the common prefix of the two files"
    if len(missing) == 2 and folder.parent.is_dir():
        found = sorted(str(p.with_suffix("")) for p in folder.parent.glob("*.idx"))
        return f"{message}; data sets in that directory: {', '.join(found[:10]) or 'none'}"
    return message


@dataclass(frozen=True)
class IndexHeader:
    """The fixed part of an .idx file."""

    dtype: np.dtype
    num_sequences: int
    num_boundaries: int

    @property
    def idx_bytes(self) -> int:
        """The size an .idx file with this header has."""
        return HEADER_BYTES + 12 * self.num_sequences + 8 * self.num_boundaries

    def to_bytes(self) -> bytes:
        """The header as it stands in the file."""
        return MAGIC + HEADER.pack(VERSION, code_of_dtype(self.dtype), self.num_sequences, self.num_boundaries)


def read_header(prefix: str) -> IndexHeader:
    """Read and check the header of `<prefix>.idx` against the file's size. Raises `DataError`."""
    path = index_path(prefix)
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if not raw.startswith(MAGIC):
        raise DataError(_magic_message(prefix, raw[: len(MAGIC)]))
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path} is cut off: {size} bytes, its header alone has {HEADER_BYTES}")
    version, code, num_sequences, num_boundaries = HEADER.unpack(raw[len(MAGIC) :])
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; this reads version {VERSION}")
    if code not in TOKEN_DTYPES:
        known = ", ".join(f"{code} {dtype}" for code, dtype in TOKEN_DTYPES.items())
        raise DataError(f"{path} has token type code {code}, which is no integer type; known are {known}")
    header = IndexHeader(TOKEN_DTYPES[code], num_sequences, num_boundaries)
    _check_index_size(path, size, header)
    return header


def _magic_message(prefix: str, found: bytes) -> str:
    path = index_path(prefix)
    if not found:
        return f"{path} is empty; it should start with {MAGIC!r}"
    message = f"{path} is no Megatron index: it starts with {found!r}, expected {MAGIC!r}"
    for magic, name in _OTHER_MAGICS.items():
        if found.startswith(magic):
            return f"{message}; this looks like {name}"
    with tokens_path(prefix).open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return f"{message}; {tokens_path(prefix)} does start so: the two files are swapped"
    return message


def _check_index_size(path: Path, size: int, header: IndexHeader) -> None:
    counts = f"{header.num_sequences} sequences and {header.num_boundaries} document boundaries"
    if size < header.idx_bytes:
        raise DataError(f"{path} is cut off: {size} bytes, but its header says {counts}, which take {header.idx_bytes}")
    if size == header.idx_bytes + header.num_sequences and header.num_sequences:
        raise DataError(f"{path} is the index of a multimodal data set (it has a mode for each sequence)")
    if size > header.idx_bytes:
        raise DataError(f"{path} is too long: {size} bytes; its header says {counts}, which take {header.idx_bytes}")
    if header.num_boundaries < 1:
        raise DataError(f"{path} has no document boundaries; even an empty data set has one")
