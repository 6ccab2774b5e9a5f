"""Whether a checkpoint fits the model that wants it: told from the manifest alone, before a tensor is read."""

from collections.abc import Iterable, Mapping

from megatron.checkpointing.assemble import WantedTensor
from megatron.checkpointing.holding import Holding
from megatron.checkpointing.inventory import SavedParameter, list_some
from megatron.checkpointing.model_values import PADDED_VOCABULARY, VOCABULARY
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.snapshot import ModelValues
from megatron.errors import CheckpointError


def model_differences(reader: CheckpointReader, model: ModelValues, *, finetune: bool) -> list[str]:
    """What differs in the saved model and can be lived with, to be said; CheckpointError that names what cannot be.

    The padding of one vocabulary can differ: it depends on the number of tensor ranks. With `finetune` any value can.
    """
    saved = reader.manifest.model
    differing = [key for key, value in model.items() if key in saved and saved[key] != value and key != VOCABULARY]
    accepted = []
    if PADDED_VOCABULARY in differing and _has_same_vocabulary(saved, model):
        differing.remove(PADDED_VOCABULARY)
        accepted.append(
            f"the vocabulary of {model[VOCABULARY]} entries was padded to {saved[PADDED_VOCABULARY]} in "
            f"{reader.directory} and is to {model[PADDED_VOCABULARY]} here: embedding and head are resized"
        )
    if differing:
        differences = "; ".join(_difference(key, saved, model) for key in differing)
        message = f"{reader.directory} is of another model: {differences}"
        if not finetune:
            raise CheckpointError(f"{message}. With finetune: true, weights of equal shapes are taken all the same")
        accepted.append(f"{message}; finetune: true takes its weights all the same")
    return accepted


def check_weights(
    reader: CheckpointReader, wanted: Iterable[WantedTensor], model: ModelValues, holding: Holding
) -> None:
    """Raise CheckpointError that names every weight that is missing, left over or of another shape."""
    wanted = list(wanted)
    saved = reader.manifest.parameters
    names = {tensor.name for tensor in wanted}
    present = [tensor for tensor in wanted if tensor.name in saved]
    reshaped = [tensor for tensor in present if not _fits(saved[tensor.name], tensor, reader.manifest.model, model)]
    faults = [
        _fault("missing in the checkpoint", [tensor.name for tensor in wanted if tensor.name not in saved]),
        _fault("not in this model", [name for name in saved if name not in names and holding.owns(name)]),
        _fault("of another shape", [_shapes(saved[tensor.name], tensor) for tensor in reshaped]),
    ]
    _raise_any(reader, "weights", faults)


def check_optimizer(reader: CheckpointReader, wanted: Iterable[WantedTensor], holding: Holding) -> None:
    """Raise CheckpointError that names every optimizer tensor that is missing, left over or of another kind."""
    if not reader.has_optimizer_state:
        raise CheckpointError(
            f"{reader.directory} has no optimizer state (it was saved with no_save_optim): set no_load_optim: true to "
            "go on with a fresh optimizer, or finetune: true to start again at iteration 0"
        )
    kinds = {tensor.name: tensor.is_counter for tensor in wanted}
    saved = _saved_kinds(reader.manifest.parameters)
    # With ZeRO a rank has no state of some parameters: those with none here are the business of other ranks.
    with_state = {tensor.parameter for tensor in wanted}
    surplus = [
        name
        for name in saved
        if name not in kinds and holding.owns(name) and (holding.shards is None or name.rsplit("/", 1)[0] in with_state)
    ]
    faults = [
        _fault("missing in the checkpoint", [name for name in kinds if name not in saved]),
        _fault("not in this model", surplus),
        _fault("of another shape", [name for name in kinds if name in saved and kinds[name] != saved[name]]),
    ]
    _raise_any(reader, "optimizer state", faults)


def _has_same_vocabulary(saved: ModelValues, model: ModelValues) -> bool:
    return saved.get(VOCABULARY) is not None and saved.get(VOCABULARY) == model.get(VOCABULARY)


def _difference(key: str, saved: ModelValues, model: ModelValues) -> str:
    text = f"{key} was {saved[key]!r} and is {model[key]!r}"
    if key != PADDED_VOCABULARY:
        return text
    before, now = (values.get(VOCABULARY) or "an unknown number of" for values in (saved, model))
    return f"{text} (for {before} and {now} tokens; with the same tokenizer set padded_vocab_size: {saved[key]})"


def _fits(saved: SavedParameter, wanted: WantedTensor, saved_model: ModelValues, model: ModelValues) -> bool:
    """Whether the shapes are equal or differ in the padding of one vocabulary, the first dim, only."""
    before, now = saved.layout.shape, wanted.layout.shape
    if before == now:
        return True
    return (
        _has_same_vocabulary(saved_model, model)
        and (before[:1], now[:1]) == ((saved_model[PADDED_VOCABULARY],), (model[PADDED_VOCABULARY],))
        and before[1:] == now[1:]
        and (wanted.layout.split_dim or 0, wanted.layout.num_fused) == (0, 1)
    )


def _shapes(saved: SavedParameter, wanted: WantedTensor) -> str:
    return f"{wanted.name} (saved {list(saved.layout.shape)}, here {list(wanted.layout.shape)})"


def _saved_kinds(parameters: Mapping[str, SavedParameter]) -> dict[str, bool]:
    """Whether it is a counter, for each optimizer tensor."""
    tensors = {f"{name}/{key}": False for name, parameter in parameters.items() for key in parameter.state}
    counters = {f"{name}/{key}": True for name, parameter in parameters.items() for key in parameter.counters}
    return tensors | counters


def _fault(what: str, names: list[str]) -> str:
    return f"{what}: {list_some(names)}" if names else ""


def _raise_any(reader: CheckpointReader, what: str, faults: list[str]) -> None:
    if any(faults):
        raise CheckpointError(f"the {what} in {reader.directory} do not fit: {'; '.join(filter(None, faults))}")
