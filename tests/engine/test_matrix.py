"""Overlap in every cell: on equals off bit for bit, both equal plain torch, and communication is what it should be."""

import pytest
import torch

from megatron.engine.stages import stage_specs
from megatron.model.decoder import Decoder, decoder_layers
from megatron.mpu.tensor_parallel import TensorParallel, parameter_placements
from tests.distributed.ranks import run_ranks
from tests.distributed.split_models import whole
from tests.distributed.toy import assert_same_bits
from tests.engine.cells import FIELDS, MORE_CELLS, Cell, all_cells, pairwise_cells, plain_torch, train_cells
from tests.engine.stage_engine import SHAPE
from tests.model.small import model_args

pytestmark = pytest.mark.distributed

# Relative to plain torch in fp32. Weights are of the order of 0.02 and move by 0.06: atol is a part of that.
LOSS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
NORM = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
WEIGHT = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


def test_the_chosen_cells_show_every_pair_of_values():
    cells = pairwise_cells()
    assert len(cells) <= 24
    for first, second in (
        ({"zero": 2, "pipe": 2}, {"zero": 1, "sequence": True}),
        ({"pipe": 2, "sequence": True}, {"tied": True, "pipe": 2}),
        ({"data": 4, "zero": 2}, {"dtype": "float16", "pipe": 2}),
    ):
        for wanted in (first, second):
            assert any(all(getattr(cell, key) == value for key, value in wanted.items()) for cell in cells), wanted


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_cells_that_show_every_pair_of_values(world_size):
    _check([cell for cell in [*pairwise_cells(), *MORE_CELLS] if cell.world_size == world_size])


@pytest.mark.matrix
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_cells(world_size):
    _check([cell for cell in all_cells() if cell.world_size == world_size], timeout_s=3000)


def _check(cells: list[Cell], timeout_s: float = 240) -> None:
    ranks = run_ranks(cells[0].world_size, train_cells, cells, timeout_s=timeout_s)
    for index, cell in enumerate(cells):
        outcomes = [rank[index] for rank in ranks]
        for on, off in outcomes:
            assert_same_bits(on.weights, off.weights)
            assert on.rows == off.rows == outcomes[0][0].rows, cell
            _check_communication(cell, on, off)
        _check_against_plain_torch(cell, [on for on, _ in outcomes])


def _check_communication(cell, on, off):
    shared = {name: count for name, (size, count) in on.gradient_elements.items() if size > 1}
    if not shared:
        assert on.bytes_sent == 0, cell
        return
    assert on.launched_in_backward > off.launched_in_backward - (cell.accumulation - 1) * on.launches, cell
    assert on.launched_in_backward > 0, f"nothing was launched in backward: {cell}"
    if cell.zero < 2:
        assert off.launched_in_backward == 0, cell
    expected = 0.0
    for group, (size, count) in on.gradient_elements.items():
        sharded = cell.zero > 0 and size > 1
        launches = cell.accumulation if cell.zero == 2 and sharded and group != "tied" else 1
        expected += launches * (1 if sharded else 2) * (size - 1) / size * 4 * count
    # Every gradient starts, and every bucket ends, at a multiple of 8 elements, a bucket at one for each rank.
    padding = 4 * 8 * cell.data * cell.tensor * cell.pipe * on.launches * 2
    assert on.bytes_sent == off.bytes_sent and expected - on.launches <= on.bytes_sent <= expected + padding, cell


def _check_against_plain_torch(cell, outcomes):
    rows, weights = plain_torch(cell.data, cell.accumulation, cell.tied)
    for row, (loss, norm) in zip(outcomes[0].rows, rows, strict=True):
        assert row[4] == 0.0, f"skipped: {cell}"
        assert row[0] == pytest.approx(loss, rel=LOSS[cell.dtype]), cell
        assert row[1] == pytest.approx(norm, rel=NORM[cell.dtype]), cell
    found = _whole_weights(cell, outcomes)
    for name, weight in weights.items():
        torch.testing.assert_close(
            found.pop(name).float(), weight, rtol=LOSS[cell.dtype], atol=WEIGHT[cell.dtype], msg=f"{name}: {cell}"
        )
    assert set(found) <= {"layers.5.final_linear.weight"}
    if found and cell.tied:
        torch.testing.assert_close(
            found.popitem()[1].float(),
            weights["layers.0.word_embeddings.weight"],
            rtol=LOSS[cell.dtype],
            atol=WEIGHT[cell.dtype],
        )


def _whole_weights(cell, outcomes):
    """Put the ranks' parts together; ranks are laid out stage by stage, then data rank, then tensor rank."""
    found = {}
    for stage in range(cell.pipe):
        placements = _placements(cell, stage)
        first = stage * cell.data * cell.tensor
        for data_rank in range(cell.data):
            parts = outcomes[first + data_rank * cell.tensor : first + (data_rank + 1) * cell.tensor]
            for name, placement in placements.items():
                held = [part.weights[name] for part in parts]
                if placement.split_dim is None:
                    assert all(torch.equal(held[0], other) for other in held), f"tensor ranks drifted: {name}"
                value = held[0] if placement.split_dim is None else whole(held, placement)
                assert torch.equal(found.setdefault(name, value), value), f"data ranks drifted: {name}"
    return found


def _placements(cell, stage):
    args = model_args(no_weight_tying=not cell.tied, **{**SHAPE, **FIELDS})
    with torch.device("meta"):
        layers = decoder_layers(args, seed=7, tensor_parallel=TensorParallel(0, cell.tensor, None, cell.sequence))
        return parameter_placements(Decoder(stage_specs(layers, "uniform", stage=stage, num_stages=cell.pipe)))
