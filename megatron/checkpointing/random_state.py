"""The random number generators of one rank, as tensors: reading them back runs no code from the file."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

PythonState = tuple[int, tuple[int, ...], float | None]
NumpyState = tuple[str, np.ndarray, int, int, float]

_GENERATOR_PREFIX = "generator/"


@dataclass(frozen=True)
class RandomState:
    """States of torch's CPU generator, the rank's accelerator (None without one), Python's and NumPy's global ones.

    `generators` holds the `torch.Generator.get_state()` of generators the caller keeps, by a name of its choice.
    """

    torch_cpu: Tensor
    accelerator: Tensor | None
    python: PythonState
    numpy: NumpyState
    generators: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def capture(cls, generators: Mapping[str, torch.Generator] | None = None) -> "RandomState":
        """The present state of this process."""
        return cls(
            torch_cpu=torch.get_rng_state(),
            accelerator=_accelerator_module().get_rng_state() if torch.accelerator.is_available() else None,
            python=_python_state(random),
            numpy=_numpy_state(np.random),
            generators={name: generator.get_state() for name, generator in (generators or {}).items()},
        )

    @classmethod
    def from_seed(cls, seed: int) -> "RandomState":
        """The state of generators freshly seeded with `seed` (0 <= seed < 2**32)."""
        accelerator = None
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
            accelerator = torch.Generator(device).manual_seed(seed).get_state()
        return cls(
            torch_cpu=torch.Generator().manual_seed(seed).get_state(),
            accelerator=accelerator,
            python=_python_state(random.Random(seed)),
            numpy=_numpy_state(np.random.RandomState(seed)),
        )

    def derived(self, data_rank: int) -> "RandomState":
        """A state for a data rank that has none saved: a function of this state and the rank's number only."""
        digest = hashlib.sha256(self.torch_cpu.numpy().tobytes() + data_rank.to_bytes(8, "little")).digest()
        return RandomState.from_seed(int.from_bytes(digest[:4], "little"))

    def restore(self, generators: Mapping[str, torch.Generator] | None = None) -> None:
        """Set this process's generators. One of `generators` with no saved state is left as it is."""
        torch.set_rng_state(self.torch_cpu)
        if self.accelerator is not None and torch.accelerator.is_available():
            _accelerator_module().set_rng_state(self.accelerator)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for name, generator in (generators or {}).items():
            if name in self.generators:
                generator.set_state(self.generators[name])

    def to_tensors(self) -> dict[str, Tensor]:
        """The content of the rank's random file. NaN stands for Python's absent second Gaussian number."""
        version, words, python_gauss = self.python
        _, keys, position, has_gauss, numpy_gauss = self.numpy
        tensors = {
            "torch_cpu": self.torch_cpu,
            "python_words": torch.tensor([version, *words], dtype=torch.int64),
            "python_gauss": torch.tensor(float("nan") if python_gauss is None else python_gauss, dtype=torch.float64),
            "numpy_words": torch.tensor([position, has_gauss, *keys.tolist()], dtype=torch.int64),
            "numpy_gauss": torch.tensor(numpy_gauss, dtype=torch.float64),
        }
        if self.accelerator is not None:
            tensors["accelerator"] = self.accelerator
        return tensors | {f"{_GENERATOR_PREFIX}{name}": state for name, state in self.generators.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "RandomState":
        """Inverse of `to_tensors`; raises KeyError for a tensor that is not there."""
        version, *words = tensors["python_words"].tolist()
        position, has_gauss, *keys = tensors["numpy_words"].tolist()
        python_gauss = tensors["python_gauss"].item()
        return cls(
            torch_cpu=tensors["torch_cpu"],
            accelerator=tensors.get("accelerator"),
            python=(version, tuple(words), None if python_gauss != python_gauss else python_gauss),
            numpy=("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, tensors["numpy_gauss"].item()),
            generators={
                name.removeprefix(_GENERATOR_PREFIX): state
                for name, state in tensors.items()
                if name.startswith(_GENERATOR_PREFIX)
            },
        )


def _python_state(source: Any) -> PythonState:
    version, words, gauss = source.getstate()
    return version, tuple(words), gauss


def _numpy_state(source: Any) -> NumpyState:
    name, keys, position, has_gauss, gauss = source.get_state()
    return name, keys, int(position), int(has_gauss), float(gauss)


def _accelerator_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
