"""`pipe_parallel_size` changes where layers run and nothing else: 0 and 1 are one run, more stages compute the same.

The public trainers have two code paths for 0 and 1, which start from other weights, write other files, and of which one
could not evaluate after training.
"""

import itertools
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.model.decoder import Decoder, decoder_layers
from megatron.mpu.tensor_parallel import NOT_SPLIT
from megatron.training.language_model import LanguageModel
from tests.distributed.ranks import run_ranks
from tests.training.in_process import assert_close, set_up_run, smoke_args, stages, train_runs
from tests.training.runs import write_corpus

pytestmark = pytest.mark.distributed

PRECISIONS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bfloat16"},
    # From a scale that overflows at first: the same steps must be skipped.
    "fp16": {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 20}},
}
CELLS = list(itertools.product(PRECISIONS, range(4)))
# Every precision and every stage of ZeRO once; the rest takes longer than a test should.
FEW_CELLS = [("fp32", 0), ("bf16", 1), ("fp16", 2), ("fp32", 3)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return {"data_path": str(write_corpus(tmp_path_factory.mktemp("corpus")))}


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _assert_0_equals_1(corpus, folder, cells):
    settings = {
        **corpus,
        "train_iters": 50,
        "lr_decay_iters": 50,
        "eval_interval": 25,
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "ddp_bucket_size": None,
    }
    runs = [
        {
            **settings,
            **PRECISIONS[precision],
            "zero_optimization": {"stage": zero},
            "pipe_parallel_size": pipe,
            "save": str(folder / f"{precision} {zero} {pipe}"),
        }
        for precision, zero in cells
        for pipe in (0, 1)
    ]
    for trained in run_ranks(2, train_runs, runs, timeout_s=280.0):
        for cell, (zero, one) in zip(cells, zip(trained[::2], trained[1::2], strict=True), strict=True):
            # In words, since a skipped step's norm is NaN, which equals nothing.
            assert repr(zero) == repr(one), cell
            assert any(skipped for *_, skipped in zero.rows) == (cell[0] == "fp16")
            assert len(zero.rows) == 50 and set(zero.evaluated) == {"valid", "test"}
            assert min(zero.losses[-5:]) < zero.losses[0] - 1.0, "nothing was learnt, so nothing was compared"
    for precision, zero in cells:
        one, other = (_files(folder / f"{precision} {zero} {pipe}") for pipe in (0, 1))
        assert one.keys() == other.keys()
        assert "global_step50/layer_001.safetensors" in one
        assert [name for name in one if one[name] != other[name]] == []


def test_0_and_1_are_the_same_run_bit_for_bit_and_write_the_same_files(corpus, tmp_path):
    _assert_0_equals_1(corpus, tmp_path, FEW_CELLS)


@pytest.mark.slow
def test_0_and_1_are_the_same_run_in_every_precision_and_zero_stage(corpus, tmp_path):
    _assert_0_equals_1(corpus, tmp_path, [cell for cell in CELLS if cell not in FEW_CELLS])


@pytest.fixture(scope="module")
def straight(corpus):
    """A run of each number of stages that nothing interrupts; four ranks each."""
    runs = run_ranks(4, train_runs, [stages(pipe, **corpus) for pipe in (0, 1, 2, 4)])
    return {pipe: [rank[index] for rank in runs] for index, pipe in enumerate((0, 1, 2, 4))}


@pytest.mark.parametrize("pipe", [1, 2, 4])
def test_stages_train_alike_from_the_same_seed_and_evaluate_after_training(straight, pipe):
    assert_close(straight[pipe][0], straight[0][0])
    assert set(straight[pipe][0].evaluated) == {"valid", "test"}
    if pipe == 1:
        assert straight[1] == straight[0]


@pytest.mark.parametrize("pipe", [0, 1, 2, 4])
def test_every_rank_learns_the_same_losses(straight, pipe):
    first, *others = straight[pipe]
    for other in others:
        assert other == first


COLLECTIVES = (
    *("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "all_gather", "broadcast"),
    *("reduce", "send", "recv", "isend", "irecv", "barrier", "batch_isend_irecv"),
)


@contextmanager
def _collectives_counted(calls):
    """Note the names of calls of torch.distributed, our own and DeepSpeed's, and of waits for the device."""

    def counted(function):
        def call(*args, **options):
            calls.append(function.__name__)
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [*((dist, name) for name in COLLECTIVES), (get_accelerator(), "synchronize")]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield


def _evaluate_then_train(rank, runs):
    return [_evaluate_then_train_one(settings) for settings in runs]


def _evaluate_then_train_one(settings):
    """Losses of an evaluation and of a step, what the whole model in one place makes of the same, and what was done."""
    run = set_up_run(settings)
    args = smoke_args(settings).with_vocabulary(512)
    whole = LanguageModel(
        Decoder(decoder_layers(args.model, seed=args.training.seed, tensor_parallel=NOT_SPLIT))
    ).requires_grad_(False)
    evaluated, trained = _Noted(run.evaluation.loaders["valid"]), _Noted(run.loop.micro_batches)
    hooks, collectives = [], []
    for parameter in run.engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: hooks.append(1))
    before = _state_of(run)
    with _collectives_counted(collectives):
        loss = float(run.engine.eval_batch(evaluated))
    quiet = _state_of(run) == before and not hooks
    result = run.engine.train_batch(trained)
    run.engine.close()
    found = (loss, float(result.loss))
    expected = [
        torch.stack([whole(batch) for batch in noted.taken]).mean().item() if noted.taken else None
        for noted in (evaluated, trained)
    ]
    return found, expected, quiet, collectives


class _Noted:
    """An iterator that keeps what was taken from it."""

    def __init__(self, batches):
        self.taken = []
        self._batches = iter(batches)

    def __iter__(self):
        return self

    def __next__(self):
        self.taken.append(next(self._batches))
        return self.taken[-1]


def _state_of(run):
    weights = {name: weight.detach().clone() for name, weight in run.engine.module.named_parameters()}
    with_gradient = [name for name, weight in run.engine.module.named_parameters() if weight.grad is not None]
    return with_gradient, torch.get_rng_state().tolist(), {name: weight.tolist() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def evaluated_then_trained(corpus):
    """What each of four ranks returns, by number of stages and stage of ZeRO."""
    cells = list(itertools.product((0, 2), (0, 1)))
    runs = [stages(pipe, **corpus, zero_optimization={"stage": zero}) for pipe, zero in cells]
    return dict(zip(cells, zip(*run_ranks(4, _evaluate_then_train, runs), strict=True), strict=True))


@pytest.mark.parametrize("pipe", [0, 2])
@pytest.mark.parametrize("zero", [0, 1])
def test_losses_are_means_over_micro_batches_and_data_ranks_on_every_rank(evaluated_then_trained, pipe, zero):
    ranks = evaluated_then_trained[pipe, zero]
    (losses,) = {found for found, *_ in ranks}
    # Data ranks have micro-batches of their own; the stages of one have the same, or none.
    for loss, expected in zip(losses, zip(*(expected for _, expected, *_ in ranks), strict=True), strict=True):
        means = set(expected) - {None}
        assert len(means) == 4 // max(pipe, 1)
        assert loss == pytest.approx(sum(means) / len(means), rel=1e-5)


@pytest.mark.parametrize("pipe", [0, 2])
def test_evaluation_touches_no_gradient_hook_or_stream_and_sums_losses_once(evaluated_then_trained, pipe):
    for *_, quiet, collectives in evaluated_then_trained[pipe, 0]:
        assert quiet
        assert collectives.count("all_reduce") == 1
        assert pipe or len(collectives) == 1


def _collectives_of_a_step(rank, runs):
    found = []
    for settings in runs:
        run = set_up_run(settings)
        for _ in range(3):  # DeepSpeed's timers start in the third step
            run.engine.train_batch(run.loop.micro_batches)
        calls: list[str] = []
        with _collectives_counted(calls):
            run.engine.train_batch(run.loop.micro_batches)
        found.append(sorted(calls))
        run.engine.close()
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_communicates_as_often_for_many_micro_batches_as_for_one_and_never_waits_for_the_device(corpus, zero):
    """DeepSpeed's plain engine waits for the device twice in each micro-batch, its pipeline engine does not."""
    settings = {**corpus, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": zero}}
    runs = [
        {**settings, "train_batch_size": 2 * accumulation, "pipe_parallel_size": pipe, "ddp_bucket_size": 10**9}
        for accumulation in (1, 8)
        for pipe in (0, 1)
    ]
    for first, *others in run_ranks(2, _collectives_of_a_step, runs):
        assert all(other == first for other in others)
        assert 3 <= len(first) <= 12
        assert "synchronize" not in first
