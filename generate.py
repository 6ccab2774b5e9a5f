"""Text from a trained model, in one process: `python generate.py a.yml b.yml --set load=checkpoints`.

Takes the files and options `train.py` takes, those of a run on many processes too: the whole model is built in this
one, in fp32. Of several processes the first does all the work. NeoX's text generation arguments say what to write and
where.
"""

import logging
import sys
from pathlib import Path

import torch

from megatron.checkpointing import LoadOptions, check_saved_model, load_checkpoint, model_values
from megatron.errors import CheckpointError, ConfigError
from megatron.launch.command_line import arguments_from_command_line
from megatron.launch.exit_status import run_worker
from megatron.model.decoder import Decoder, decoder_layers
from megatron.model.kv_cache import KVCache
from megatron.monitor.log import setup_logging
from megatron.mpu.tensor_parallel import TensorParallel
from megatron.neox_arguments import NeoXArgs
from megatron.text_generation import DecodeSettings, Sampling, TextGenerator, generate_text
from megatron.tokenizer import Tokenizer, build_tokenizer

_log = logging.getLogger("megatron.generate")


def main() -> int:
    """Run `text_gen_type` and return the exit status."""
    args, rank = arguments_from_command_line(sys.argv[1:], __doc__ or "", whole_model=True)
    setup_logging(rank.rank)
    if rank.rank > 0:
        return 0
    if rank.world_size > 1:
        _log.info("generating in the first of %d processes; the others have nothing to do", rank.world_size)
    generate(args)
    return 0


def generate(args: NeoXArgs) -> None:
    """Load the latest checkpoint under `load` and do what the text generation section asks."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    tokenizer = build_tokenizer(args.data.tokenizer_type, args.data.vocab_file, args.data.merge_file)
    args = args.with_vocabulary(tokenizer.vocab_size)
    section = args.text_generation
    generator = TextGenerator(
        load_model(args, device, vocab_size=tokenizer.vocab_size),
        tokenizer,
        decode_settings(args, tokenizer),
        seed=args.training.seed,
        make_cache=None if section.recompute else KVCache,
        device=device,
    )
    generate_text(
        generator,
        text_gen_type=section.text_gen_type,
        num_samples=section.num_samples,
        prompt_end=section.prompt_end,
        sample_input_file=section.sample_input_file,
        sample_output_file=section.sample_output_file,
    )


def load_model(args: NeoXArgs, device: torch.device, *, vocab_size: int) -> Decoder:
    """The trained decoder on `device`, whatever parallelism it was trained with."""
    if args.checkpoint.load is None:
        raise ConfigError("load is not set: give the directory of the checkpoints to generate from")
    root, iteration = Path(args.checkpoint.load), args.checkpoint.iteration
    options, values = LoadOptions(no_load_rng=True), model_values(args.model, vocab_size=vocab_size)
    check_saved_model(root, values, options=options, iteration=iteration)  # before there is a model
    decoder = Decoder(decoder_layers(args.model, seed=args.training.seed, tensor_parallel=TensorParallel()))
    weights = dict(decoder.named_parameters())
    if load_checkpoint(root, weights=weights, model=values, options=options, iteration=iteration) is None:
        raise CheckpointError(f"there is no checkpoint under load: {root}")
    return decoder.to(device).eval()


def decode_settings(args: NeoXArgs, tokenizer: Tokenizer) -> DecodeSettings:
    """How long and how freely to write."""
    section = args.text_generation
    return DecodeSettings(
        sampling=Sampling(section.temperature, section.top_k, section.top_p),
        maximum_tokens=section.maximum_tokens,
        max_length=args.model.max_position_embeddings,
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        return_logits=section.return_logits,
    )


if __name__ == "__main__":
    run_worker(main)
