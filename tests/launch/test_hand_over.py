"""A configuration survives the command line, and secrets stay off it."""

import shlex

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.launch.hand_over import OPTION, pack, unpack
from tests.launch.runs import ODD_PATH

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3), max_leaves=9
)

# On a busy machine, making the first example alone takes a second.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def handed_over(flat):
    option, _, payload = pack(flat).partition("=")
    assert option == OPTION
    return unpack(payload)


@unhurried
@given(st.dictionaries(st.text("abc", min_size=1), values))
def test_every_configuration_comes_back(flat):
    assert handed_over(flat) == flat


def test_a_file_name_that_is_no_unicode_comes_back():
    assert handed_over({"data_path": "caf\udce9"}) == {"data_path": "caf\udce9"}


@unhurried
@given(st.text())
def test_shells_and_launchers_find_nothing_to_take_apart(text):
    assert shlex.quote(pack({"data_path": text})) == pack({"data_path": text})


def test_odd_path():
    assert handed_over({"data_path": ODD_PATH}) == {"data_path": ODD_PATH}


@pytest.mark.parametrize(
    "flat",
    [
        {"wandb_api_key": "x"},
        {"monitor": [{"inner": {"HF_TOKEN": "x"}}]},
        {"tensorboard": {"password": "x"}},
        {"aws-secret": "x"},
    ],
)
def test_secrets_are_refused_by_name_and_not_shown(flat):
    with pytest.raises(ConfigError, match="looks like a secret") as refused:
        pack(flat)
    assert "'x'" not in str(refused.value)


def test_names_that_only_sound_like_secrets_pass():
    names = ["maximum_tokens", "tokenizer_type", "num_attention_heads", "query_key_layer_scaling", "untoken"]
    assert handed_over(dict.fromkeys(names, 1)) == dict.fromkeys(names, 1)


def test_a_configuration_longer_than_an_argument_may_be_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"takes \d{6} bytes .* allows 131071; train_data_paths"):
        pack({"train_data_paths": ["x" * 100] * 1000, "seed": 1})


@pytest.mark.parametrize("payload", ["", "%%%", "bm8=", "WzFd", "eyJ"])
def test_what_is_no_configuration_is_refused(payload):
    with pytest.raises(ConfigError, match="does not hold a configuration"):
        unpack(payload)
