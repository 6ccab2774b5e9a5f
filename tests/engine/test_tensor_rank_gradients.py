"""Contract lines 17 and 18: gradients and copies over tensor ranks, against the same model in one process."""

import itertools

import pytest
import torch

from megatron.model.decoder import Decoder
from megatron.model.loss import lm_loss
from megatron.mpu.tensor_parallel import parameter_placements
from tests.distributed.ranks import run_ranks
from tests.distributed.split_models import whole
from tests.engine.cells import FIELDS
from tests.engine.stage_engine import SHAPE, batch_of, stage_engine, step_batches, weights_of
from tests.model.small import model_args, specs

pytestmark = pytest.mark.distributed

ACCUMULATION, DATA, TENSOR = 4, 2, 2
MODEL = {**FIELDS, "use_qk_layernorm": True}


def _trained(zero_stage, sequence, num_steps):
    """Return the first step's averages and norm, which tensor ranks hold what, the launches a bucket, and weights."""
    engine, grid = stage_engine(
        tensor=TENSOR, sequence=sequence, zero_stage=zero_stage, accumulation=ACCUMULATION, fields=MODEL
    )
    reducer, update, averages = engine._reducer, engine.optimizer.update, []

    def noting():
        averages.append({name.removeprefix("decoder."): g.clone() for name, g in reducer.gradients().items()})
        return update()

    engine.optimizer.update = noting
    results = []
    for step in range(1, num_steps + 1):
        results.append(engine.train_batch(step_batches(step, grid.data.rank, ACCUMULATION)))
    collectives = [(bucket.plan.group.name, bucket.plan.group.size, len(bucket.times)) for bucket in reducer._buckets]
    placements = {name.removeprefix("decoder."): p for name, p in parameter_placements(engine.module).items()}
    norms = [float(result.grad_norm) for result in results]
    return averages[0], norms, placements, collectives, weights_of(engine)


def _every_way(rank):
    return {
        (zero_stage, sequence): _trained(zero_stage, sequence, 6) for zero_stage in (0, 1) for sequence in (False, True)
    }


def _one_process():
    """Each parameter's gradient, averaged over all micro-batches of all data ranks, and the norm of all of them."""
    model = Decoder(specs(model_args(no_weight_tying=True, **{**SHAPE, **MODEL})))
    for rank, micro_batch in itertools.product(range(DATA), range(ACCUMULATION)):
        batch = batch_of(1, micro_batch, rank)
        loss = lm_loss(model(batch.tokens_BS), batch.labels_BS, batch.loss_mask_BS)
        (loss / (DATA * ACCUMULATION)).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return {name: parameter.grad for name, parameter in model.named_parameters()}, float(norm)


@pytest.fixture(scope="module")
def ranks():
    """Data rank 0 is ranks 0 and 1, data rank 1 is ranks 2 and 3: tensor ranks are neighbours."""
    return run_ranks(DATA * TENSOR, _every_way)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_contract_17_gradients_are_summed_over_tensor_ranks_and_averaged_over_data_ranks(ranks, sequence):
    expected, _ = _one_process()
    results = [rank[0, sequence] for rank in ranks]
    placements = results[0][2]
    partial = {name for name, placement in placements.items() if placement.partial_gradient}
    assert {name.split(".")[-2] for name in partial} >= ({"input_layernorm"} if sequence else set())
    assert len(partial) > (10 if sequence else 0)
    for first in range(0, DATA * TENSOR, TENSOR):
        for name, gradient in expected.items():
            parts = [results[first + tensor_rank][0][name] for tensor_rank in range(TENSOR)]
            if placements[name].split_dim is None:
                assert torch.equal(*parts), name
            value = parts[0] if placements[name].split_dim is None else whole(parts, placements[name])
            # The gradient of a bias of keys is nothing but rounding: softmax does not see it.
            tolerance = max(2e-5 * float(gradient.abs().max()), 1e-9)
            torch.testing.assert_close(value, gradient, rtol=1e-5, atol=tolerance, msg=lambda m, n=name: n + m)
    for _, _, _, collectives, _ in results:
        assert {group[:2] for group in collectives} == {("data", 2), ("data x tensor", 4)}
        assert {count for *_, count in collectives} == {1}, "once a step, whatever the number of micro-batches"


@pytest.mark.parametrize("way", [(0, False), (0, True), (1, False), (1, True)], ids=str)
def test_contract_18_copies_are_bit_identical_after_steps_and_count_once_in_the_norm(ranks, way):
    _, expected_norm = _one_process()
    results = [rank[way] for rank in ranks]
    copies = [name for name, placement in results[0][2].items() if placement.split_dim is None]
    assert len(copies) > 10
    for _, norms, _, _, weights in results:
        assert norms == results[0][1]
        assert norms[0] == pytest.approx(expected_norm, rel=1e-5)
        for name in copies:
            assert torch.equal(weights[name], results[0][4][name]), name
