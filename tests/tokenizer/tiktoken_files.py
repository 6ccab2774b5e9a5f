"""The vocabulary of a byte-level tokenizers file as tiktoken wants it, by tiktoken's own table of bytes."""

import base64
import json
from pathlib import Path

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str


def _bytes_of_characters() -> dict[str, int]:
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def ranks_of(tokenizer_json: Path) -> dict[bytes, int]:
    table = _bytes_of_characters()
    vocab = json.loads(tokenizer_json.read_text("utf-8"))["model"]["vocab"]
    return {bytes(table[c] for c in token): id for token, id in vocab.items() if token != "<|endoftext|>"}


def reference_encoding(tokenizer_json: Path) -> tiktoken.Encoding:
    ranks = ranks_of(tokenizer_json)
    return tiktoken.Encoding(
        "reference", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )


def write_ranks(ranks: dict[bytes, int], path: Path) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path
