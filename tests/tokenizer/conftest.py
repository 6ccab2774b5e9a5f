"""Small vocabularies trained on the spot, in the files that users have them in."""

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers

REPOSITORY = Path(__file__).resolve().parents[2]


def sample_text() -> str:
    modules = ("argparse.py", "textwrap.py", "json/decoder.py")
    return "".join(Path(sysconfig.get_path("stdlib"), name).read_text("utf-8") for name in modules)


@dataclass(frozen=True)
class Gpt2Release:
    """A folder laid out as GPT-2's: 256 bytes, then merges in their order, then <|endoftext|>."""

    folder: Path

    @property
    def vocab(self) -> Path:
        return self.folder / "vocab.json"

    @property
    def merges(self) -> Path:
        return self.folder / "merges.txt"

    @property
    def json(self) -> Path:
        return self.folder / "tokenizer.json"


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory) -> Gpt2Release:
    folder = tmp_path_factory.mktemp("gpt2")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([sample_text()], vocab_size=600, show_progress=False)
    trained.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({**vocab, "<|endoftext|>": len(vocab)}))
    trained.add_special_tokens(["<|endoftext|>"])
    trained.save(str(folder / "tokenizer.json"))
    return Gpt2Release(folder)


@pytest.fixture(scope="session")
def real_gpt2() -> Path:
    """GPT-2's own tokenizer, where it lies beside the repository."""
    path = REPOSITORY.parent / "shared" / "data" / "gpt2_tokenizer.json"
    if not path.exists():
        pytest.skip(f"needs {path.name} in ../shared/data")
    return path
