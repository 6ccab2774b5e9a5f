"""Megatron-core's data modules, which the tests compare with. Its package is called megatron too: ours is widened."""

import importlib
import importlib.metadata
import warnings

import megatron


def load(name):
    """The module `megatron.core.datasets.<name>` of the installed megatron-core."""
    installed = str(importlib.metadata.distribution("megatron-core").locate_file("megatron"))
    if installed not in megatron.__path__:
        megatron.__path__.append(installed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional GPU packages
        return importlib.import_module(f"megatron.core.datasets.{name}")
