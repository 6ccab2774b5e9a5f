"""From the data arguments of a run to its training, validation and test sets."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.data.blend import Blend, BlendedDataset, make_blend, weights_by_num_documents
from megatron.data.document_split import SPLIT_NAMES, split_boundaries
from megatron.data.gpt_dataset import GPTDataset, TokenDataset
from megatron.data.index_cache import IndexRequest, ensure_cached
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_index import epochs_for_samples, samples_in_epochs
from megatron.errors import ConfigError, DataError
from megatron.neox_arguments.data import DataArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitSizes:
    """Samples a run reads from each split; 0 where it reads none."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True)
class Splits:
    """The data sets of a run; None for a split that is not read or has no documents."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None


@dataclass(frozen=True)
class _Source:
    """A range of documents of one data set."""

    dataset: IndexedDataset
    first_document: int
    last_document: int

    @property
    def num_documents(self) -> int:
        return self.last_document - self.first_document

    def num_tokens(self) -> int:
        """Raises `DataError` where there is no token to train on."""
        num_tokens = self.dataset.documents(self.first_document, self.last_document).size
        if not num_tokens:
            chosen = f"{self.num_documents} documents from number {self.first_document} on"
            raise DataError(f"'{self.dataset.prefix}': no tokens in its {chosen}, so no samples can be made")
        return num_tokens


@dataclass(frozen=True)
class _SplitSources:
    """Where the documents of a split are, and in which proportions to read them; no sources: the split is empty."""

    name: str
    sources: list[_Source]
    weights: Sequence[float]


@dataclass(frozen=True)
class _SplitPlan:
    """How to read `blend.num_samples` samples of a split: a request for each source the blend takes from, else None."""

    blend: Blend
    requests: list[IndexRequest | None]


def build_train_valid_test(
    data_args: DataArgs,
    *,
    seq_length: int,
    seed: int,
    num_samples: SplitSizes,
    is_builder: bool,
    wait: Callable[[], None],
) -> Splits:
    """Open the data sets of a run; each holds exactly the number of samples asked for, of seq_length + 1 tokens.

    The ranks with `is_builder` (one, or one for each file system) build the sample indices that are not cached yet; all
    others wait for them. Collective: every rank must call it with the same arguments, and `wait` (a barrier over all
    ranks) is called once on each, also where the builder fails; all ranks then raise the same error.

    Raises `DataError` for data that cannot be used, among it a training split without documents; a validation or test
    split without documents is None and warned of. Raises `ConfigError` for a `split` or weights that make no sense.
    """
    sizes = (num_samples.train, num_samples.valid, num_samples.test)
    plans = [
        _plan_split(split, size, seq_length, seed) for split, size in zip(_find_sources(data_args), sizes, strict=True)
    ]
    if num_samples.train and plans[0] is None:
        raise DataError(_nothing_to_train_on(data_args))
    with _waiting(wait):
        if is_builder:
            for request in [request for plan in plans if plan for request in plan.requests if request]:
                ensure_cached(request)
    train, valid, test = (_open_split(plan) if plan else None for plan in plans)
    return Splits(train, valid, test)


def train_samples_in_epochs(data_args: DataArgs, *, seq_length: int, num_epochs: int) -> int:
    """Training samples in `num_epochs` passes over the training documents, those of all sources together.

    Raises `DataError` as `build_train_valid_test`.
    """
    train, _, _ = _find_sources(data_args)
    return sum(samples_in_epochs(num_epochs, source.num_tokens(), seq_length) for source in train.sources)


def _nothing_to_train_on(data_args: DataArgs) -> str:
    if data_args.data_path is None:
        return "nothing to train on: set data_path, or train_data_paths"
    return f"nothing to train on: split '{data_args.split}' leaves no documents of '{data_args.data_path}' to train"


@contextmanager
def _waiting(wait: Callable[[], None]) -> Iterator[None]:
    """Call `wait` at the end, also when the builder failed: the others must not wait for ever."""
    try:
        yield
    finally:
        wait()


def _find_sources(data_args: DataArgs) -> list[_SplitSources]:
    """The documents of the train, valid and test split. Raises `DataError`, `ConfigError`."""
    separate = (data_args.train_data_paths, data_args.valid_data_paths, data_args.test_data_paths)
    if data_args.data_path is not None and any(separate):
        raise ConfigError("data_path and train/valid/test_data_paths exclude each other: set one of the two")
    if data_args.data_path is not None:
        return _split_one(_open_dataset(data_args.data_path, data_args), data_args.split)
    weights = (data_args.train_data_weights, data_args.valid_data_weights, data_args.test_data_weights)
    return [
        _whole_datasets(name, [_open_dataset(path, data_args) for path in paths or []], given, data_args)
        for name, paths, given in zip(SPLIT_NAMES, separate, weights, strict=True)
    ]


def _open_dataset(path: str, data_args: DataArgs) -> IndexedDataset:
    dataset = IndexedDataset(path)
    if data_args.mmap_warmup:
        dataset.warm_up()
    return dataset


def _split_one(dataset: IndexedDataset, split: str) -> list[_SplitSources]:
    bounds = split_boundaries(dataset.num_documents, split)
    return [
        _SplitSources(name, [_Source(dataset, first, last)] if last > first else [], [1.0])
        for name, first, last in zip(SPLIT_NAMES, bounds[:-1], bounds[1:], strict=True)
    ]


def _whole_datasets(
    name: str, datasets: list[IndexedDataset], weights: Sequence[float] | None, data_args: DataArgs
) -> _SplitSources:
    if data_args.weight_by_num_documents and datasets:
        num_documents = [dataset.num_documents for dataset in datasets]
        weights = weights_by_num_documents(num_documents, data_args.weighted_sampler_alpha)
    sources = [_Source(dataset, 0, dataset.num_documents) for dataset in datasets]
    return _SplitSources(name, sources, weights or [1.0] * len(sources))


def _plan_split(split: _SplitSources, num_samples: int, seq_length: int, seed: int) -> _SplitPlan | None:
    if num_samples and not split.sources:
        logger.warning("no documents for the %s split: it is left out", split.name)
    if not num_samples or not split.sources:
        return None
    blend = make_blend(split.weights, num_samples, [source.dataset.prefix for source in split.sources])
    requests = [
        _request(source, count, seq_length, seed) for source, count in zip(split.sources, blend.counts(), strict=True)
    ]
    return _SplitPlan(blend, requests)


def _request(source: _Source, num_samples: int, seq_length: int, seed: int) -> IndexRequest | None:
    if not num_samples:
        return None
    num_tokens = source.num_tokens()
    num_epochs = epochs_for_samples(num_samples, num_tokens, seq_length)
    epochs = num_samples * seq_length / num_tokens
    documents = f"'{source.dataset.prefix}' documents {source.first_document} to {source.last_document - 1}"
    logger.info("%s: %d samples in %.2f epochs of %d tokens", documents, num_samples, epochs, num_tokens)
    if num_tokens <= seq_length:
        logger.warning("%s: %d tokens do not fill one sample of %d", documents, num_tokens, seq_length + 1)
    return IndexRequest(source.dataset, source.first_document, source.last_document, seq_length, num_epochs, seed)


def _open_split(plan: _SplitPlan) -> TokenDataset:
    counts = plan.blend.counts()
    datasets = [
        GPTDataset(request, count) if request else None for request, count in zip(plan.requests, counts, strict=True)
    ]
    for dataset in datasets:
        if dataset is not None:
            dataset.open()
    if len(datasets) == 1 and datasets[0] is not None:
        return datasets[0]
    return BlendedDataset(datasets, plan.blend)
