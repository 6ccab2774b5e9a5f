"""From nothing to a trained small model and a text it wrote, on a machine without a GPU and without a download.

`make quickstart` runs this. Every stage is a command that a user could type, and is printed; what is already there is
not made again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.yml"
VOCABULARY = 8192
PROMPT = "def main("


@dataclass(frozen=True)
class Layout:
    """Where everything of one quickstart lies."""

    runs: Path

    @property
    def data(self) -> Path:
        """Corpus, tokenizer and token files."""
        return self.runs / "quickstart" / "data"

    @property
    def corpus(self) -> Path:
        """One JSON object a document."""
        return self.data / "stdlib.jsonl"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that was trained on the corpus."""
        return self.data / "tokenizer.json"

    @property
    def tokens(self) -> Path:
        """Prefix of the token files."""
        return self.data / "stdlib"

    @property
    def logs(self) -> Path:
        """Metrics and exit record."""
        return self.runs / "quickstart" / "logs"

    @property
    def checkpoints(self) -> Path:
        """What training saves and generation loads."""
        return self.runs / "quickstart" / "checkpoints"

    @property
    def text(self) -> Path:
        """The continuation of the prompt."""
        return self.runs / "quickstart" / "text.jsonl"

    def overrides(self) -> list[str]:
        """Options that point the configuration at this layout."""
        return [
            f"--set=data_path={self.tokens}_text_document",
            f"--set=vocab_file={self.tokenizer}",
            f"--set=log_dir={self.logs}",
            f"--set=save={self.checkpoints}",
            f"--set=load={self.checkpoints}",
        ]


def main() -> int:
    """Run all stages and print the summary; return the exit status of the first stage that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs-dir", default="runs", help="where to put data, checkpoints, metrics and text")
    parser.add_argument("--num_gpus", default="2", help="worker processes")
    options, more = parser.parse_known_args()
    layout = Layout(Path(options.runs_dir))
    started = time.monotonic()
    stages = [*_data_stages(layout), _training(layout, options.num_gpus, more), _generation(layout, more)]
    for title, output, command in stages:
        if output is not None and output.exists():
            print(f"\n== {title}: {output} is there already", flush=True)
            continue
        print(f"\n== {title}\n$ {shlex.join(command)}", flush=True)
        status = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=False).returncode
        if status:
            print(f"quickstart stopped: '{title}' ended with status {status}", file=sys.stderr)
            return status
    _summarise(layout, time.monotonic() - started)
    return 0


Stage = tuple[str, "Path | None", list[str]]


def _data_stages(layout: Layout) -> list[Stage]:
    corpus, tokenizer, tokens = str(layout.corpus), str(layout.tokenizer), str(layout.tokens)
    return [
        (
            "Corpus: the standard library of this Python, one document a file",
            ROOT / corpus,
            ["python", "tools/datasets/corpora.py", "--name", "stdlib", "--output", corpus],
        ),
        (
            f"Tokenizer: byte-level BPE with {VOCABULARY} entries",
            ROOT / tokenizer,
            [
                *("python", "tools/datasets/train_tokenizer.py", "--input", corpus, "--output", tokenizer),
                *("--vocab-size", str(VOCABULARY)),
            ],
        ),
        (
            "Tokens: .bin and .idx",
            ROOT / f"{tokens}_text_document.idx",
            [
                *("python", "tools/datasets/preprocess_data.py", "--input", corpus, "--output-prefix", tokens),
                *("--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer, "--append-eod", "--workers", "2"),
            ],
        ),
    ]


def _training(layout: Layout, num_gpus: str, more: list[str]) -> Stage:
    command = ["python", "./deepy.py", "train.py", CONFIG, "--num_gpus", num_gpus, *layout.overrides(), *more]
    return ("Training: overlapped gradient reduction on worker processes", None, command)


def _generation(layout: Layout, more: list[str]) -> Stage:
    prompt_file = layout.runs / "quickstart" / "prompt.txt"
    (ROOT / prompt_file).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / prompt_file).write_text(PROMPT)
    command = ["python", "generate.py", CONFIG, *layout.overrides(), *more]
    command += ["--set=text_gen_type=input-file", f"--set=sample_input_file={prompt_file}"]
    command += [f"--set=sample_output_file={layout.text}", "--set=maximum_tokens=64", "--set=temperature=0.8"]
    return ("Generation", None, command)


def _summarise(layout: Layout, elapsed_s: float) -> None:
    """Say what came out, where it is and what to do next."""
    rows = [json.loads(line) for line in (ROOT / layout.logs / "metrics.jsonl").read_text().splitlines()]
    training = [row for row in rows if "tokens_per_s" in row]
    validation = [row for row in rows if row.get("split") == "valid"]
    first, last = training[0], training[-1]
    timed = [row["tokens_per_s"] for row in training[1:] or training]
    hidden = [row["hidden_fraction"] for row in training[1:] or training if row["hidden_fraction"] is not None]
    text = json.loads((ROOT / layout.text).read_text().splitlines()[0])
    hidden_line = f"{100 * sum(hidden) / len(hidden):.0f} %" if hidden else "nothing to reduce"
    print(f"""
== Summary ({elapsed_s:.0f} s)
loss                {first["lm_loss"]:.3f} -> {last["lm_loss"]:.3f} in {last["iteration"]} iterations
validation loss     {validation[-1]["lm_loss"]:.3f} (perplexity {validation[-1]["ppl"]:.1f})
tokens/s            {sum(timed) / len(timed):.0f}
hidden              {hidden_line} of the gradient communication ran under backward
checkpoints         {layout.checkpoints}
metrics             {layout.logs / "metrics.jsonl"}
text                {layout.text}
                    {text["context"]!r} -> {text["text"][:120]!r}

What next
  the same with the reduction after backward:  python ./deepy.py train.py {CONFIG} --num_gpus 2 \\
      --set overlap_grad_reduce=false --set save=null --set load=null --set log_dir=runs/sequential
  another size or precision:                   add --set hidden_size=384 --set precision=bfloat16
  your own text:                               python tools/datasets/preprocess_data.py --help""")


if __name__ == "__main__":
    sys.exit(main())
