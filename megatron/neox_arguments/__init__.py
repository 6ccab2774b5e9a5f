"""Typed argument sections: YAML files in, one frozen `NeoXArgs` out. Imports no torch."""

from megatron.neox_arguments.arguments import NeoXArgs, load_args, load_flat
from megatron.neox_arguments.deepspeed_config import deepspeed_config
from megatron.neox_arguments.derive import pad_vocab_size

__all__ = ["NeoXArgs", "deepspeed_config", "load_args", "load_flat", "pad_vocab_size"]
