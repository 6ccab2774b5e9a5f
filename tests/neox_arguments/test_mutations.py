"""Valid configurations changed at random: each loads, or is refused with a message."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.neox_arguments import load_args, load_flat
from megatron.neox_arguments.arguments import _SECTION_OF
from megatron.neox_arguments.known import HINTS, PARTLY_SUPPORTED, UNSUPPORTED
from megatron.neox_arguments.yaml_files import read_files
from tests.neox_arguments.examples import SHARED, SMALL

NESTED = {"optimizer", "fp16", "bf16", "zero_optimization", "batch_size", "clip_grad"}
FILES = sorted((SHARED / "neox_configs").rglob("*.yml"))

_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 9)
    | st.sampled_from([10**30, 2**63, 1e308, 1e-320, "6e-4", "", "null", "fp16", "all"])
    | st.floats()
    | st.text(max_size=8)
)
_junk = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
_names = st.sampled_from(sorted({*_SECTION_OF, *UNSUPPORTED, *HINTS, *PARTLY_SUPPORTED, *NESTED}))
_inner_names = st.sampled_from(
    ["type", "params", "params.lr", "params.betas", "params.eps", "stage", "enabled", "loss_scale", "hysteresis", "a.b"]
)
_keys = _names | st.builds("{}.{}".format, st.sampled_from(sorted(NESTED)), _inner_names) | st.text(max_size=8)


def _loads_or_is_refused(load):
    try:
        args = load()
    except ConfigError as error:
        assert str(error).strip()
        return
    again = load_flat(json.loads(json.dumps(args.flat)), world_size=args.parallelism.world_size)
    for section in set(_SECTION_OF.values()):
        assert getattr(again, section) == getattr(args, section)
    assert again.notices == args.notices


@given(st.dictionaries(_names | st.text(max_size=8), _junk, max_size=4), st.integers(0, 9))
def test_changed_values_load_or_are_refused(changes, world_size):
    _loads_or_is_refused(lambda: load_flat({**SMALL, **changes}, world_size=world_size))


@given(st.sampled_from(sorted(SMALL)), st.text(max_size=12))
def test_a_changed_key_is_refused(key, other):
    flat = dict(SMALL)
    flat[other] = flat.pop(key)
    if other in {*_SECTION_OF, *UNSUPPORTED, *HINTS, *PARTLY_SUPPORTED, *NESTED}:
        _loads_or_is_refused(lambda: load_flat(flat, world_size=1))
        return
    with pytest.raises(ConfigError, match="unknown key"):
        load_flat(flat, world_size=1)


@given(st.lists(st.tuples(_keys, _junk), max_size=4), st.integers(1, 9))
def test_overrides_of_any_kind_load_or_are_refused(tmp_path_factory, overrides, world_size):
    path = tmp_path_factory.getbasetemp() / "small.yml"
    if not path.exists():
        path.write_text(json.dumps(SMALL))
    texts = [f"{key}={yaml.safe_dump(value)}" for key, value in overrides]
    _loads_or_is_refused(lambda: load_args([path], overrides=texts, world_size=world_size))


@given(st.text(alphabet="ab:-[]{},'\"!&*#|>?%@ \n\t\\0123456789.eE+_~<=", max_size=30))
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yml"
    path.write_text(text)
    try:
        read_files([path])
    except ConfigError as error:
        assert "any.yml" in str(error)


@pytest.mark.skipif(not FILES, reason="the public configurations are not beside this checkout")
@given(
    st.lists(st.sampled_from(FILES), min_size=1, max_size=2, unique=True),
    st.dictionaries(_names | st.text(max_size=8), _junk, max_size=3),
    st.integers(1, 9),
)
def test_public_configurations_with_changed_values_load_or_are_refused(files, changes, world_size):
    def load():
        flat = {key: setting.value for key, setting in read_files(files).items()}
        return load_flat({**flat, "zero_optimization": {"stage": 0}, **changes}, world_size=world_size)

    _loads_or_is_refused(load)
