"""Contract line 35: ranks that differ are told so at start, all of them in the same words, and nobody hangs."""

import pytest
import torch.distributed as dist

from megatron.data_parallel.agreement import check_ranks_agree
from megatron.engine import build
from megatron.errors import ConfigError
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, Trainer
from tests.engine.stage_engine import stage_engine, step_batches

pytestmark = pytest.mark.distributed

ODD = 1


def _freeze(name):
    def freeze(model, grid):
        for found, parameter in model.named_parameters():
            if found == f"decoder.{name}":
                parameter.requires_grad_(False)

    return freeze


NORM = "layers.1.input_layernorm.weight"
HEAD = "layers.5.final_linear.weight"
# What the odd rank does otherwise, and what every rank's message must have in it.
DIFFERENCES = {
    "freezing": ({"prepare": _freeze(NORM)}, ("parameters of stage 0", f"{NORM} [24] trained", f"{NORM} [24] frozen")),
    "width": ({"fields": {"hidden_size": 48}}, ("parameters of stage 0", "[96, 24]", "[96, 48]")),
    "layers": ({"fields": {"num_layers": 4}}, ("parameters of stage 0", "more such lines")),
    "bucket size": ({"bucket_elements": 1000}, ("settings", "bucket_elements 2000", "bucket_elements 1000")),
    "ZeRO": ({"zero_stage": 2}, ("settings", "zero_stage 0", "zero_stage 2")),
    "accumulation": (
        {"accumulation": 2},
        ("settings", "gradient_accumulation_steps 1", "gradient_accumulation_steps 2"),
    ),
    "flag": ({"overlap": False}, ("settings", "overlap True", "overlap False")),
}


def _message(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "no error"


def _odd_rank_differs(rank, common):
    messages = {
        name: _message(lambda odd=odd: stage_engine(**{**common, **(odd if rank == ODD else {})}))
        for name, (odd, _) in DIFFERENCES.items()
        if name != "width" or "tensor" not in common or common["tensor"] == 1
    }
    engine, grid = stage_engine(**common)  # and the process is none the worse for it
    return messages, float(engine.train_batch(step_batches(1, grid.data.rank, 1)).loss)


@pytest.mark.parametrize("common", [{}, {"tensor": 2}], ids=["data ranks", "tensor ranks"])
def test_contract_35_a_rank_with_another_model_or_other_settings_is_named_with_the_difference(common):
    ranks = run_ranks(2, _odd_rank_differs, common, timeout_s=60)
    for messages, loss in ranks:
        assert messages == ranks[0][0] and loss == ranks[0][1] > 0
        for name, message in messages.items():
            assert message.startswith("ranks 0 and 1 do not agree on "), (name, message)
            assert all(part in message for part in DIFFERENCES[name][1]), (name, message)


def _narrow_on_one_tensor_rank(rank):
    fields = {"num_attention_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 64 if rank != ODD else 128}
    return _message(lambda: stage_engine(tensor=2, fields=fields))


def test_contract_35_another_width_on_one_tensor_rank():
    first, second = run_ranks(2, _narrow_on_one_tensor_rank, timeout_s=60)
    assert first == second and "[32, 24]" in first and "[64, 24]" in first


def _stages_differ(rank):
    last_stage = rank >= 2
    return [
        _message(lambda: stage_engine(pipe=2, tied=True, prepare=_freeze(HEAD) if last_stage else None)),
        _message(lambda: stage_engine(pipe=2, tied=True, bucket_elements=1000 if rank == 3 else 2000)),
        _message(lambda: stage_engine(pipe=2, prepare=_freeze(HEAD) if rank == 3 else None)),
        _message(lambda: stage_engine(pipe=2, tied=True, fields={"padded_vocab_size": 120} if rank == 3 else None)),
    ]


def test_contract_35_ranks_of_other_stages_learn_of_it_as_well():
    ranks = run_ranks(4, _stages_differ, timeout_s=60)
    assert all(messages == ranks[0] for messages in ranks)
    frozen_copy, settings, frozen, vocabulary = ranks[0]
    assert "ranks 0 and 2 do not agree on the tied weight of first and last stage" in frozen_copy
    assert "'group tied of 4 ranks" in frozen_copy and "the other has nothing" in frozen_copy
    assert "ranks 0 and 3 do not agree on the settings of the run" in settings
    for message in (frozen, vocabulary):
        assert "ranks 2 and 3 do not agree on the parameters of stage 1" in message and HEAD in message


def _plans_differ(rank):
    """The same model and settings, and still another plan."""
    planned, real = [], build.plan_buckets

    def other_plan(order, *args, bucket_elements, **kwargs):
        planned.append(order)
        return real(order, *args, bucket_elements=bucket_elements + 1000 * (rank == ODD), **kwargs)

    build.plan_buckets = other_plan
    by_engine = _message(stage_engine)
    build.plan_buckets = real
    by_order = _message(lambda: check_ranks_agree({"x": ["a", "b"] if rank == ODD else ["b", "a"]}, dist.group.WORLD))
    by_trainer = _message(lambda: Trainer(Options(bucket_elements=700 + 700 * rank)))
    return by_engine, by_order, by_trainer, len(planned)


def test_contract_35_plans_that_differ_are_refused_before_the_first_step():
    ranks = run_ranks(2, _plans_differ, timeout_s=60)
    assert ranks[0] == ranks[1]
    by_engine, by_order, by_trainer, num_planned = ranks[0]
    assert num_planned == 1 and "the gradient buckets of stage 0" in by_engine and "elements'" in by_engine
    assert (
        by_order == "ranks 0 and 1 do not agree on x: the first has 'b' where the other has 'a', and 1 more such lines"
    )
    assert "the gradient buckets" in by_trainer and "bucket " in by_trainer
