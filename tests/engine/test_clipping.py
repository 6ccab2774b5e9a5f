"""Contract line 25: one norm and one clip factor, however the model is spread; torch's own in one process beside it."""

import itertools

import pytest
import torch

from megatron.model.decoder import Decoder
from megatron.model.loss import lm_loss
from tests.distributed.ranks import run_ranks
from tests.engine.cells import FIELDS
from tests.engine.stage_engine import SHAPE, batch_of, stage_engine, step_batches, weights_of
from tests.model.small import model_args, specs

pytestmark = pytest.mark.distributed

# Far below the norm, and small enough for SGD at a rate of 1; Adam would hide a wrong factor.
MAX_NORM, RATE, NUM_STEPS, ACCUMULATION = 0.05, 1.0, 3, 2
ON_TWO_RANKS = [{"zero_stage": zero_stage} for zero_stage in (0, 1, 2)]
OVER_TENSOR_RANKS = [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"tensor": 2, "sequence": True, "zero_stage": 1}]
OVER_STAGES = [{"pipe": 2, "zero_stage": zero_stage} for zero_stage in (0, 1, 2)]
ON_FOUR_RANKS = [
    *({"pipe": 2, "zero_stage": zero_stage} for zero_stage in (0, 2)),
    *({"pipe": 2, "tensor": 2, "sequence": True, "zero_stage": zero_stage} for zero_stage in (0, 1)),
]


def _several(rank, variants):
    results = []
    for options in variants:
        engine, grid = stage_engine(
            tied=True,
            accumulation=ACCUMULATION,
            rule="sgd",
            learning_rate=RATE,
            max_norm=MAX_NORM,
            fields=FIELDS,
            **options,
        )
        norms = [
            float(engine.train_batch(step_batches(step, grid.data.rank, ACCUMULATION)).grad_norm)
            for step in range(1, NUM_STEPS + 1)
        ]
        results.append((norms, weights_of(engine)))
        engine.close()
    return results


def _one_process(num_data_ranks):
    """The same training by torch's clip_grad_norm_ and SGD."""
    model = Decoder(specs(model_args(no_weight_tying=False, **{**SHAPE, **FIELDS})))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.SGD([{"params": matrices, "weight_decay": 0.01}, {"params": others}], lr=RATE)
    norms = []
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        for rank, micro_batch in itertools.product(range(num_data_ranks), range(ACCUMULATION)):
            batch = batch_of(step, micro_batch, rank)
            loss = lm_loss(model(batch.tokens_BS), batch.labels_BS, batch.loss_mask_BS)
            (loss / (num_data_ranks * ACCUMULATION)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        # A warmup of two steps, then the first of a cosine over 98.
        rate = RATE * min(1.0, step / 2) if step <= 2 else RATE * 0.5 * (1 + float(torch.tensor(torch.pi / 98).cos()))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "num_data_ranks", "variants"),
    [
        (2, 2, ON_TWO_RANKS),
        (2, 1, OVER_TENSOR_RANKS),
        (2, 1, OVER_STAGES),
        (4, 2, ON_FOUR_RANKS[:2]),
        (4, 1, ON_FOUR_RANKS[2:]),
    ],
    ids=["ZeRO", "tensor ranks", "stages", "stages and ZeRO", "stages and tensor ranks"],
)
def test_contract_25_one_norm_and_one_clip_factor_equal_to_torchs(world_size, num_data_ranks, variants):
    expected_norms, expected = _one_process(num_data_ranks)
    assert min(expected_norms) > 10 * MAX_NORM, "premise: every step is clipped"
    for results in run_ranks(world_size, _several, variants):
        for options, (norms, weights) in zip(variants, results, strict=True):
            assert norms == pytest.approx(expected_norms, rel=1e-5), options
            for name, weight in weights.items():
                if name in expected and weight.shape == expected[name].shape:
                    torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=2e-7, msg=f"{name} {options}")
