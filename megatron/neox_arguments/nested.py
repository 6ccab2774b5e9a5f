"""NeoX's nested values and second names, turned into flat keys: one key for one thing from here on.

`optimizer`, `fp16`, `bf16`, `zero_optimization`, `batch_size`, `clip_grad` and `precision` are taken apart; whatever
they set twice to different values is refused with both places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.errors import ConfigError
from megatron.neox_arguments.yaml_files import Setting

_SECOND_NAMES = {"batch_size": "train_micro_batch_size_per_gpu", "clip_grad": "gradient_clipping"}
_OPTIMIZER_TYPES = {"adam": "adam", "adamw": "adamw", "sgd": "sgd", "lion": "lion"}
_UNSUPPORTED_OPTIMIZERS = frozenset(
    {"onebitadam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "zerooneadam", "onebitlamb", "lamb", "muon"}
)
_OPTIMIZER_PARAMS = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
}
_FP16_KEYS = {
    "loss_scale": "loss_scale",
    "initial_scale_power": "initial_scale_power",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_scale",
}
# Of zero_optimization only the stage decides anything with ZeRO 0; the others are DeepSpeed's and wait for their stage.
_ZERO_KEYS = frozenset(
    {
        "stage",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "reduce_scatter",
        "reduce_bucket_size",
        "contiguous_gradients",
        "cpu_offload",
        "round_robin_gradients",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "ignore_unused_parameters",
    }
)
_PRECISIONS = {"fp32": "fp32", "bfloat16": "bfloat16", "bf16": "bfloat16", "fp16": "fp16"}


class _Flat:
    """Flat settings under construction; setting a key twice to different values is refused."""

    def __init__(self) -> None:
        self.settings: dict[str, Setting] = {}

    def set(self, key: str, value: Any, origin: str) -> None:
        earlier = self.settings.get(key)
        if earlier is not None and earlier.value != value:
            raise ConfigError(
                f"{key} is {earlier.value!r} by {earlier.origin} and {value!r} by {origin}: set it in one place"
            )
        self.settings.setdefault(key, Setting(value, origin))


def flatten(settings: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """Return settings whose keys all name a field or a known argument, and notices about what has no effect."""
    flat = _Flat()
    notices: list[str] = []
    special: dict[str, Callable[[Setting], None]] = {
        "optimizer": lambda setting: _optimizer(flat, setting),
        "optimizer_type": lambda setting: flat.set("optimizer_type", _optimizer_name(setting), setting.origin),
        "fp16": lambda setting: _fp16(flat, setting, notices),
        "bf16": lambda setting: _bf16(flat, setting),
        "precision": lambda setting: flat.set("precision", _precision(setting), setting.origin),
        "communication_data_type": lambda setting: flat.set(
            "communication_data_type", _PRECISIONS.get(str(setting.value), setting.value), setting.origin
        ),
        "zero_optimization": lambda setting: _zero(flat, setting, notices),
    }
    for key, setting in settings.items():
        if key in special:
            special[key](setting)
        else:
            flat.set(_SECOND_NAMES.get(key, key), setting.value, setting.origin)
    return flat.settings, notices


def _mapping(key: str, setting: Setting) -> dict[str, Any]:
    if not isinstance(setting.value, dict) or not all(isinstance(name, str) for name in setting.value):
        raise ConfigError(f"{key} must hold nested keys and values ({setting.origin}), not {setting.value!r}")
    return {name.replace("-", "_"): value for name, value in setting.value.items()}


def _refuse_unknown(key: str, values: Mapping[str, Any], known: frozenset[str] | set[str], setting: Setting) -> None:
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ConfigError(
            f"{key} has {', '.join(unknown)} ({setting.origin}), which is not known there; known are "
            f"{', '.join(sorted(known))}"
        )


def _optimizer_name(setting: Setting) -> str:
    name = _OPTIMIZER_TYPES.get(str(setting.value).lower())
    if name is None and str(setting.value).lower() not in _UNSUPPORTED_OPTIMIZERS:
        raise ConfigError(
            f"unknown optimizer {setting.value!r} ({setting.origin}); there are Adam, AdamW, SGD and Lion"
        )
    if name is None:
        raise ConfigError(
            f"optimizer {setting.value!r} ({setting.origin}) is not supported here yet, only Adam, AdamW, SGD, Lion"
        )
    return name


def _optimizer(flat: _Flat, setting: Setting) -> None:
    values = _mapping("optimizer", setting)
    _refuse_unknown("optimizer", values, {"type", "params"}, setting)
    kind = _optimizer_name(Setting(values.get("type", "adam"), setting.origin))
    flat.set("optimizer_type", kind, setting.origin)
    params = _mapping("optimizer.params", Setting(values.get("params", {}), setting.origin))
    _refuse_unknown(f"optimizer.params of {kind}", params, set(_OPTIMIZER_PARAMS[kind]), setting)
    for key, value in params.items():
        flat.set(key, value, f"{setting.origin} optimizer.params")


def _switch(key: str, name: str, values: Mapping[str, Any], setting: Setting) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}.{name} must be true or false ({setting.origin}), not {value!r}")
    return value


def _fp16(flat: _Flat, setting: Setting, notices: list[str]) -> None:
    values = _mapping("fp16", setting)
    allowed = {"enabled", "fp16", "type", "auto_cast", "consecutive_hysteresis", *_FP16_KEYS}
    _refuse_unknown("fp16", values, allowed, setting)
    if _switch("fp16", "consecutive_hysteresis", values, setting):
        raise ConfigError(f"fp16.consecutive_hysteresis ({setting.origin}) is not supported here yet")
    if _switch("fp16", "auto_cast", values, setting):
        notices.append("fp16.auto_cast: there are no floating inputs to cast, only token ids")
    if _switch("fp16", "enabled", values, setting):
        kind = values.get("type", "fp16")
        flat.set("precision", _precision(Setting(kind, setting.origin)), f"{setting.origin} fp16")
    for key, flat_key in _FP16_KEYS.items():
        if key in values:
            flat.set(flat_key, values[key], f"{setting.origin} fp16")


def _bf16(flat: _Flat, setting: Setting) -> None:
    values = _mapping("bf16", setting)
    _refuse_unknown("bf16", values, {"enabled"}, setting)
    if _switch("bf16", "enabled", values, setting):
        flat.set("precision", "bfloat16", f"{setting.origin} bf16")


def _precision(setting: Setting) -> Any:
    return _PRECISIONS.get(str(setting.value), setting.value)


def _zero(flat: _Flat, setting: Setting, notices: list[str]) -> None:
    values = _mapping("zero_optimization", setting)
    _refuse_unknown("zero_optimization", values, _ZERO_KEYS, setting)
    stage = values.get("stage", 0)
    flat.set("zero_stage", stage, f"{setting.origin} zero_optimization")
    if values.get("cpu_offload"):
        raise ConfigError(f"zero_optimization.cpu_offload ({setting.origin}) is not supported here yet")
    others = sorted(values.keys() - {"stage", "cpu_offload"})
    if others and stage == 0:
        notices.append(
            f"zero_optimization: {', '.join(others)} have no effect with ZeRO 0; gradient buckets are sized by "
            "ddp_bucket_size and reduced under backward with overlap_grad_reduce"
        )
