"""Reading files: numbers, names, merging, places in messages, overrides."""

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments.overrides import apply_overrides
from megatron.neox_arguments.yaml_files import read_files


def _values(tmp_path, *texts):
    paths = []
    for index, text in enumerate(texts):
        path = tmp_path / f"{index}.yml"
        path.write_text(text)
        paths.append(path)
    return {key: setting.value for key, setting in read_files(paths).items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [("6e-4", 6e-4), ("1E3", 1e3), ("1e+3", 1e3), ("-2.5e-1", -0.25), (".5e1", 5.0), ("12", 12), ("0.1", 0.1)],
)
def test_numbers_are_numbers(tmp_path, text, value):
    read = _values(tmp_path, f"key: {text}")["key"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("text", ["e5", "1e", "abc1e5", "1.2.3e4", "'1e5'", "010", "1:30", "2026-01-01", "2001-13-45"])
def test_what_only_looks_like_a_number_stays_text(tmp_path, text):
    assert isinstance(_values(tmp_path, f"key: {text}")["key"], str)


def test_json_with_comments_and_trailing_commas_and_dashes_in_names(tmp_path):
    text = '# a comment\n{\n  "num-layers": 2, # another\n  "split": "969, 30, 1",\n  "nested": {"a": [1, 2,], },\n}\n'
    assert _values(tmp_path, text) == {"num_layers": 2, "split": "969, 30, 1", "nested": {"a": [1, 2]}}


def test_files_merge_and_the_same_value_twice_is_fine(tmp_path):
    assert _values(tmp_path, "a: 1\nb: 2", "b: 2\nc: 3") == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("texts", "places"),
    [
        (["a: 1\nb: 2\n", "c: 1\nb: 3\n"], ["0.yml:2", "1.yml:2"]),
        (["b-b: 2\nx: 1\nb_b: 3\n"], ["0.yml:1", "0.yml:3"]),
        (["outer:\n  inner: 2\n  other: 1\n  inner: 3\n"], ["0.yml:2", "0.yml:4"]),
        (["outer:\n  in-ner: 2\n  in_ner: 3\n"], ["0.yml:2", "0.yml:3"]),
        (["a: 1\n", "a: true\n"], ["0.yml:1", "1.yml:1"]),
        (["a: {b: [1, 0]}\n", "a: {b: [1, false]}\n"], ["0.yml:1", "1.yml:1"]),
    ],
)
def test_a_key_set_twice_to_different_values_names_both_places(tmp_path, texts, places):
    with pytest.raises(ConfigError) as error:
        _values(tmp_path, *texts)
    assert all(place in str(error.value) for place in places)


@pytest.mark.parametrize(
    "text",
    [
        *("a: [1, 2", "- 1\n- 2\n", "just text", "1: 2", "a: !!python/object:os.system x", "? [a]"),
        *(
            "a: &x [*x]",
            "a: " + "[" * 5000,
            "a: !!int x",
            "a: !!bool x",
            "a: !!timestamp x",
            "a: 1\n---\nb: 2",
            "a: \0",
        ),
    ],
)
def test_what_is_no_mapping_of_names_is_refused_with_the_file(tmp_path, text):
    with pytest.raises(ConfigError, match=r"0\.yml"):
        _values(tmp_path, text)


def test_an_empty_file_sets_nothing_and_a_missing_one_is_named(tmp_path):
    assert _values(tmp_path, "") == {}
    with pytest.raises(ConfigError, match="nowhere"):
        read_files([tmp_path / "nowhere.yml"])


def test_a_name_means_that_file_with_yml_in_the_given_directory(tmp_path):
    (tmp_path / "125M.yml").write_text("num_layers: 12")
    settings = read_files(["125M"], conf_dir=tmp_path)
    assert settings["num_layers"].value == 12
    assert settings["num_layers"].origin.endswith("125M.yml:1")


def test_overrides_win_unset_and_reach_into_nested_values(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("a: 1\nb: 2\noptimizer: {type: Adam, params: {lr: 1.0, eps: 1.0}}")
    settings = read_files([path])
    overrides = ["a=5", "b=null", "optimizer.params.lr=1e-4", "optimizer.params.eps=null", "new-key=[1, x]"]
    changed = {key: setting.value for key, setting in apply_overrides(settings, overrides).items()}
    assert changed == {"a": 5, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "new_key": [1, "x"]}
    assert settings["optimizer"].value["params"] == {"lr": 1.0, "eps": 1.0}


@pytest.mark.parametrize(
    "override", ["nothing", "=3", "a..b=1", "a.b=1", "a={", "a=!!int x", "a=!!timestamp x", "a=" + "[" * 5000]
)
def test_an_override_that_cannot_be_applied_is_refused(tmp_path, override):
    path = tmp_path / "a.yml"
    path.write_text("a: 1")
    with pytest.raises(ConfigError, match=r"--set|YAML"):
        apply_overrides(read_files([path]), [override])
