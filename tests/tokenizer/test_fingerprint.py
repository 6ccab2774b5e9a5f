"""Fingerprints: equal where the ids are, different where they are not."""

import json
import subprocess
import sys

import pytest

from megatron.tokenizer import build_tokenizer
from tests.tokenizer.conftest import REPOSITORY


def test_fingerprint_is_that_of_the_ids_whatever_the_file(gpt2):
    one = build_tokenizer("HFTokenizer", gpt2.json)
    two = build_tokenizer("GPT2BPETokenizer", gpt2.vocab, gpt2.merges)
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != build_tokenizer("CharLevelTokenizer", None).fingerprint


def test_fingerprint_is_the_same_in_every_process_and_release():
    assert build_tokenizer("CharLevelTokenizer", None).fingerprint.startswith("538c9fcbb0c631ee")


def changed(gpt2, path, change):
    content = json.loads(gpt2.json.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return build_tokenizer("HFTokenizer", path)


def swap_two_ids(content):
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def drop_merges(content):
    content["model"]["merges"] = content["model"]["merges"][:50]


def split_digits(content):
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]],
    }


def normalize(content):
    content["normalizer"] = {"type": "NFC"}


def add_token(content):
    added = content["added_tokens"][0]
    content["added_tokens"].append({**added, "content": "<|more|>", "id": added["id"] + 1})


@pytest.mark.parametrize("change", [swap_two_ids, drop_merges, split_digits, normalize, add_token])
def test_fingerprint_sees_every_change_of_ids(gpt2, tmp_path, change):
    other = changed(gpt2, tmp_path / "other.json", change)
    assert other.fingerprint != build_tokenizer("HFTokenizer", gpt2.json).fingerprint


def test_importing_the_package_imports_no_tokenizer_library():
    program = (
        "import sys, megatron.tokenizer as t; t.build_tokenizer('CharLevelTokenizer', None).encode('a')\n"
        "print({'tokenizers', 'tiktoken', 'sentencepiece', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
