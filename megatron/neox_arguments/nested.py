"""NeoX's nested values and second names, turned into flat keys: one key for one thing from here on.

`optimizer`, `fp16`, `bf16`, `zero_optimization`, `batch_size`, `clip_grad` and `precision` are taken apart; whatever
they set twice to different values is refused with both places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from megatron.errors import ConfigError
from megatron.neox_arguments.optimizer import PARAMS_OF
from megatron.neox_arguments.yaml_files import Setting
from megatron.neox_arguments.yaml_values import Kind, same_value, shown, wrong_kind
from megatron.neox_arguments.zero3 import PASSED_ON, WITHOUT_EFFECT, problems_of_options

SECOND_NAMES = {"batch_size": "train_micro_batch_size_per_gpu", "clip_grad": "gradient_clipping"}
_UNSUPPORTED_OPTIMIZERS = frozenset(
    {"onebitadam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "zerooneadam", "onebitlamb", "lamb", "muon"}
)
FP16_KEYS = {
    "loss_scale": "loss_scale",
    "initial_scale_power": "initial_scale_power",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_scale",
}
_FP16_SWITCHES = ("enabled", "fp16", "auto_cast", "consecutive_hysteresis")
_PRECISIONS = {"fp32": "fp32", "bfloat16": "bfloat16", "bf16": "bfloat16", "fp16": "fp16"}
# Of zero_optimization only the stage decides anything with ZeRO 0; the others are DeepSpeed's and wait for their stage.
_ZERO_KINDS: dict[str, Kind] = {"stage": "int", "cpu_offload": "bool", **PASSED_ON, **WITHOUT_EFFECT}
_ZERO_OFFLOAD = ("cpu_offload", "offload_optimizer", "offload_param")


Path = tuple[str, ...]
# Every way of saying one thing. `--set` of one way makes the others in the files void.
WAYS_OF_SAYING: tuple[tuple[Path, ...], ...] = (
    *(((second,), (first,)) for second, first in SECOND_NAMES.items()),
    (("optimizer_type",), ("optimizer", "type")),
    *(
        ((name,), ("optimizer", "params", name))
        for name in sorted({name for names in PARAMS_OF.values() for name in names})
    ),
    (("precision",), ("fp16", "enabled"), ("fp16", "fp16"), ("fp16", "type"), ("bf16", "enabled")),
    *(((flat,), ("fp16", name)) for name, flat in FP16_KEYS.items()),
    (("zero_stage",), ("zero_optimization", "stage")),
)


# Most elements in a bucket of ZeRO 1 and 2, which is reduced and gathered as one.
_ZERO_BUCKET_SIZES = ("reduce_bucket_size", "allgather_bucket_size")


class Flattened(NamedTuple):
    """Settings whose keys all name a field or a known argument; what has no effect; what cannot be taken apart."""

    settings: dict[str, Setting]
    notices: list[str]
    problems: list[str]


def flatten(settings: Mapping[str, Setting]) -> Flattened:
    """Take nested values and second names apart. A value of null means unset, as everywhere in NeoX."""
    stage = settings.get("zero_stage")
    flat = _Flat(None if stage is None else stage.value)
    special: dict[str, Callable[[Setting], None]] = {
        "optimizer": flat.optimizer,
        "optimizer_type": lambda setting: flat.plain("optimizer_type", _optimizer_name(setting), setting),
        "fp16": flat.fp16,
        "bf16": flat.bf16,
        "precision": lambda setting: flat.plain("precision", _precision(setting.value), setting),
        "communication_data_type": lambda setting: flat.plain(
            "communication_data_type", _precision(setting.value), setting
        ),
        "zero_optimization": flat.zero,
        "zero_options": flat.refuse_derived,
    }
    for key, setting in settings.items():
        if key not in special:
            flat.set(SECOND_NAMES.get(key, key), setting.value, setting.origin, key)
        elif setting.value is not None:
            try:
                special[key](setting)
            except ConfigError as error:
                flat.problems.append(str(error))
    flat.refuse_what_is_switched_off()
    return Flattened(flat.settings, flat.notices, flat.problems)


class _Flat:
    """Flat settings under construction, with everything that was wrong on the way."""

    def __init__(self, zero_stage: Any) -> None:
        self._zero_stage = zero_stage
        self.settings: dict[str, Setting] = {}
        self.notices: list[str] = []
        self.problems: list[str] = []
        self._said: dict[str, str] = {}
        self._switched_off: dict[str, str] = {}  # precision: where its block says `enabled: false`

    def set(self, key: str, value: Any, origin: str, said: str) -> None:
        """Set a key; setting it twice to different values is a problem. `said` is the name it has in the files."""
        earlier = self.settings.get(key)
        if earlier is None or earlier.value is None:
            self.settings[key], self._said[key] = Setting(value, origin), said
        elif value is not None and not same_value(earlier.value, value):
            self.problems.append(
                f"{key} is {shown(earlier.value)} by {self._said[key]} ({earlier.origin}) and {shown(value)} by {said} "
                f"({origin}): set it in one place"
            )

    def plain(self, key: str, value: Any, setting: Setting) -> None:
        """Set a key that has its own name in the files."""
        self.set(key, value, setting.origin, key)

    def refuse_derived(self, setting: Setting) -> None:
        raise ConfigError(f"zero_options ({setting.origin}) is derived: set zero_optimization")

    def optimizer(self, setting: Setting) -> None:
        values = _mapping("optimizer", setting, {"type", "params"})
        kind = _optimizer_name(Setting(values.get("type") or "adam", setting.place("type")))
        self.set("optimizer_type", kind, setting.place("type"), "optimizer.type")
        params = Setting(values.get("params") or {}, setting.place("params"))
        for key, value in _mapping(f"optimizer.params of {kind}", params, PARAMS_OF[kind]).items():
            self.set(key, value, setting.place(f"params.{key}"), f"optimizer.params.{key}")

    def fp16(self, setting: Setting) -> None:
        values = _mapping("fp16", setting, (*_FP16_SWITCHES, "type", *FP16_KEYS))
        _check_kinds("fp16", values, dict.fromkeys(_FP16_SWITCHES, "bool"), setting)
        if values.get("consecutive_hysteresis"):
            raise ConfigError(f"fp16.consecutive_hysteresis ({setting.origin}) is not supported here yet")
        if values.get("auto_cast"):
            self.notices.append("fp16.auto_cast: there are no floating inputs to cast, only token ids")
        switches = [values[name] for name in ("enabled", "fp16") if values.get(name) is not None]
        if len(set(switches)) > 1:
            raise ConfigError(f"fp16.enabled and fp16.fp16 contradict each other ({setting.origin})")
        if any(switches):
            self.set("precision", _precision(values.get("type") or "fp16"), setting.place("enabled"), "fp16.enabled")
        elif switches:
            self._switched_off["fp16"] = f"fp16.enabled ({setting.place('enabled')})"
        for key, flat_key in FP16_KEYS.items():
            if key in values:
                self.set(flat_key, values[key], setting.place(key), f"fp16.{key}")

    def bf16(self, setting: Setting) -> None:
        values = _mapping("bf16", setting, {"enabled"})
        _check_kinds("bf16", values, {"enabled": "bool"}, setting)
        if values.get("enabled"):
            self.set("precision", "bfloat16", setting.place("enabled"), "bf16.enabled")
        elif values.get("enabled") is False:
            self._switched_off["bfloat16"] = f"bf16.enabled ({setting.place('enabled')})"

    def zero(self, setting: Setting) -> None:
        values = _mapping("zero_optimization", setting, _ZERO_KINDS)
        _check_kinds("zero_optimization", values, _ZERO_KINDS, setting)
        stage = values.get("stage")
        if stage is None and isinstance(self._zero_stage, (int, float)):
            stage = self._zero_stage  # said by its flat name
        self.set("zero_stage", stage or 0, setting.place("stage"), "zero_optimization.stage")
        if stage == 3:
            self._zero3(values, setting)
            return
        for name in _ZERO_OFFLOAD:
            if values.get(name):
                raise ConfigError(f"zero_optimization.{name} ({setting.origin}) is not supported here yet")
        limits = [values[key] for key in _ZERO_BUCKET_SIZES if stage and values.get(key)]
        if limits:
            self.set("zero_bucket_limit", min(limits), setting.origin, "zero_optimization.reduce_bucket_size")
        others = sorted(values.keys() - {"stage", *_ZERO_OFFLOAD} - set(_ZERO_BUCKET_SIZES if stage else ()))
        if others:
            self.notices.append(
                f"zero_optimization: {', '.join(others)} have no effect with ZeRO {stage or 0}; gradient buckets are "
                "sized by ddp_bucket_size and reduced under backward with overlap_grad_reduce"
            )

    def _zero3(self, values: dict[str, Any], setting: Setting) -> None:
        """Keep what is for DeepSpeed's ZeRO 3."""
        if values.get("cpu_offload"):
            raise ConfigError(
                f"zero_optimization.cpu_offload ({setting.origin}) has another name with ZeRO 3: offload_optimizer: "
                "{device: cpu}"
            )
        options = {key: values[key] for key in PASSED_ON if values.get(key) is not None}
        if problems := problems_of_options(options):
            raise ConfigError("\n".join(f"{problem} ({setting.origin})" for problem in problems))
        self.set("zero_options", options, setting.origin, "zero_optimization")
        ignored = [key for key in WITHOUT_EFFECT if values.get(key) is not None]
        if ignored:
            self.notices.append(f"zero_optimization: {', '.join(ignored)} have no effect with ZeRO 3")

    def refuse_what_is_switched_off(self) -> None:
        """A block that says `enabled: false` contradicts a precision that says the opposite."""
        precision = self.settings.get("precision")
        if precision is None or not isinstance(precision.value, str):
            return
        if (off := self._switched_off.get(precision.value)) is not None:
            self.problems.append(
                f"precision is {precision.value!r} by {self._said['precision']} ({precision.origin}), and switched off "
                f"by {off}: set it in one place"
            )


def _mapping(key: str, setting: Setting, known: Iterable[str]) -> dict[str, Any]:
    """Return nested values, with `_` for `-` in their names, all of which must be known."""
    if not isinstance(setting.value, dict) or not all(isinstance(name, str) for name in setting.value):
        raise ConfigError(f"{key} must hold nested keys and values ({setting.origin}), not {shown(setting.value)}")
    values = {name.replace("-", "_"): value for name, value in setting.value.items()}
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"{key} has {', '.join(unknown)} ({setting.origin}), which is not known there; known are "
            f"{', '.join(sorted(known))}"
        )
    return values


def _check_kinds(key: str, values: Mapping[str, Any], kinds: Mapping[str, Kind], setting: Setting) -> None:
    problems = [
        f"{key}.{name}: {shown(values[name])} ({setting.place(name)}): {problem}"
        for name, kind in kinds.items()
        if values.get(name) is not None and (problem := wrong_kind(values[name], kind))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _optimizer_name(setting: Setting) -> str:
    name = str(setting.value).lower()
    if name in PARAMS_OF:
        return name
    if name in _UNSUPPORTED_OPTIMIZERS:
        raise ConfigError(
            f"optimizer {shown(setting.value)} ({setting.origin}) is not supported here yet, only Adam, AdamW, SGD and "
            "Lion"
        )
    raise ConfigError(
        f"unknown optimizer {shown(setting.value)} ({setting.origin}); there are Adam, AdamW, SGD and Lion"
    )


def _precision(value: Any) -> Any:
    return _PRECISIONS.get(value, value) if isinstance(value, str) else value
