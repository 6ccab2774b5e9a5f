"""Reads the file an offline wandb run leaves: LevelDB's log format around wandb's protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    position, record = FILE_HEADER_BYTES, b""
    while position + CHUNK_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < CHUNK_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(data, position)
        position += CHUNK_HEADER.size
        record += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield Record.FromString(record)
            record = b""


def run_header(path: Path) -> Any:
    return next(record.run for record in records(path) if record.HasField("run"))


def exit_code(path: Path) -> int:
    return next(record.exit.exit_code for record in records(path) if record.HasField("exit"))


def history(path: Path) -> list[dict[str, float]]:
    """What was logged, one dictionary a step, wandb's own underscore keys but `_step` left out."""
    rows = []
    for record in records(path):
        if record.HasField("history"):
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            rows.append({key: value for key, value in items.items() if key == "_step" or not key.startswith("_")})
    return rows
