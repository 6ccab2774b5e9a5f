import io
import json

import pytest

from megatron.errors import ConfigError, DataError
from megatron.text_generation import (
    DecodeSettings,
    Sampling,
    TextGenerator,
    converse,
    generate_text,
    read_prompts,
    write_samples,
)
from tests.text_generation.decoders import EOD, MAX_LENGTH, VOCAB_SIZE, as_model, make_cache, reference_decoder

ALPHABET = "\0abcdefghijklmnopqrstuvwxyz .,!?\n"


class Letters:
    def encode(self, text):
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(ALPHABET[index] for index in ids)


@pytest.fixture(scope="module")
def decoder():
    return as_model(reference_decoder())


def text_generator(decoder, **changes):
    values = {
        "sampling": Sampling(1.0, 0, 0.9),
        "maximum_tokens": 8,
        "max_length": MAX_LENGTH,
        "eod": EOD,
        "vocab_size": len(ALPHABET),
    }
    assert len(ALPHABET) < VOCAB_SIZE
    return TextGenerator(decoder, Letters(), DecodeSettings(**(values | changes)), seed=1, make_cache=make_cache)


def test_unconditional_starts_from_end_of_document(decoder):
    starts = []

    def model(tokens_BS, cache=None):
        starts.append(tokens_BS[:, 0].tolist())
        return decoder(tokens_BS, cache)

    samples = list(text_generator(model).samples([""] * 20))
    assert len(samples) == 20
    assert starts[0] == [EOD] * 16
    assert len({sample.text for sample in samples}) > 10
    assert all(sample.context == "" and 0 <= sample.length <= 8 for sample in samples)


def test_sample_n_is_the_same_in_any_batch(decoder):
    generator = text_generator(decoder)
    prompts = [f"{letter}b" for letter in "abcdefghijklmnopqrst"]
    texts = [sample.text for sample in generator.samples(prompts)]
    assert texts == [sample.text for sample in generator.samples(prompts)]
    assert [sample.text for sample in generator.samples(prompts[17:], first=17)] == texts[17:]


def test_file_of_samples(decoder, tmp_path, caplog):
    path = tmp_path / "new" / "samples.txt"
    generator = text_generator(decoder, sampling=Sampling())
    assert write_samples(generator.samples(["hello", "x" * MAX_LENGTH]), path) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sorted(row) for row in rows] == [
        ["context", "duration_seconds", "finished", "length", "message", "text"]
    ] * 2
    assert rows[0]["context"] == "hello"
    assert rows[0]["message"] is None
    assert rows[0]["length"] == len(rows[0]["text"])
    assert (rows[1]["text"], rows[1]["length"]) == ("", 0)
    assert f"{MAX_LENGTH} tokens" in rows[1]["message"]
    assert rows[1]["message"] in caplog.text


def test_logits_in_the_file(decoder, tmp_path):
    path = tmp_path / "samples.txt"
    write_samples(text_generator(decoder, return_logits=True).samples(["hello"]), path)
    row = json.loads(path.read_text())
    assert len(row["logits"]) == row["length"] + row["finished"]
    assert len(row["logits"][0]) == len(ALPHABET)


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\n  second \nthird")
    assert read_prompts(path) == ["first", "second", "third"]
    path.write_text("def f():\n    pass\n###\nclass A:\n###\n")
    assert read_prompts(path, "###") == ["def f():\n    pass", "class A:"]


def test_prompts_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="absent"):
        read_prompts(tmp_path / "absent")
    (tmp_path / "blank").write_text(" \n\n")
    with pytest.raises(DataError, match="no prompt"):
        read_prompts(tmp_path / "blank")


def typed(lines):
    remaining = iter(lines)

    def read(_):
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    return read


def contexts(decoder, lines, prompt_end):
    seen = []

    class Recording(Letters):
        def encode(self, text):
            seen.append(text)
            return super().encode(text)

    generator = text_generator(decoder)
    written = []
    recording = TextGenerator(decoder, Recording(), generator.settings, 1, make_cache)
    converse(recording, prompt_end=prompt_end, read=typed(lines), write=written.append)
    assert len(written) == len(seen)
    return seen


def test_conversation(decoder):
    assert contexts(decoder, ["one", "two"], "\n") == ["one", "two"]
    assert contexts(decoder, ["one", "more!", "two", "left open"], "!") == ["one\nmore"]


def test_types_of_generation(decoder, tmp_path, monkeypatch, capsys):
    generator = text_generator(decoder)
    output = tmp_path / "out.jsonl"
    assert generate_text(generator, text_gen_type="unconditional", num_samples=3, sample_output_file=output) == output
    assert len(output.read_text().splitlines()) == 3
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    written = generate_text(generator, text_gen_type="input-file", sample_input_file=prompts, num_samples=7)
    assert written == tmp_path / "prompts.txt.output.jsonl"
    assert [json.loads(line)["context"] for line in written.read_text().splitlines()] == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert generate_text(generator, text_gen_type="interactive") is None
    assert next(iter(generator.samples(["one"]))).text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text_gen_type", "named"),
    [
        (None, "unconditional, input-file, interactive"),
        ("precompute", "'precompute'"),
        ("input-file", "sample_input_file"),
        ("unconditional", "sample_output_file"),
    ],
)
def test_what_is_missing_is_named(decoder, text_gen_type, named):
    with pytest.raises(ConfigError, match=named):
        generate_text(text_generator(decoder), text_gen_type=text_gen_type)


@pytest.mark.parametrize(
    ("sampling", "said"), [(Sampling(0.0, 5), True), (Sampling(), False), (Sampling(1.0, 5), False)]
)
def test_filters_without_a_temperature_are_said_to_do_nothing(decoder, tmp_path, caplog, sampling, said):
    generator = text_generator(decoder, sampling=sampling)
    generate_text(generator, text_gen_type="unconditional", sample_output_file=tmp_path / "out")
    assert ("temperature is 0" in caplog.text) == said
