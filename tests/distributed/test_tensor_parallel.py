"""Decoders split over tensor ranks, with and without sequence parallelism, against the same decoder in one piece."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model.kv_cache import KVCache
from megatron.mpu.grid import build_grid
from megatron.mpu.mappings import gather_logits
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel, parameter_placements
from megatron.text_generation import DecodeSettings, Sampling, generate_tokens
from tests.distributed.ranks import run_ranks
from tests.distributed.split_models import (
    CASES,
    DROPOUT,
    FOUR_WAYS,
    SEQ_LENGTH,
    batch,
    build,
    loss_and_gradients,
    split,
    whole,
)

pytestmark = pytest.mark.distributed

# fp32: a rank's partial sums are rounded in another order, which moves a gradient by this much of its tensor's largest.
FP32_TOLERANCE = 1e-5
# bf16: how far from the fp32 gradient of one rank a parameter's may be, as a share of its norm, on top of twice the
# distance of the decoder in one piece in bf16. A parameter of one element (scalenorm's) is a sum that cancels to
# nothing in this dtype and is left to fp32.
BF16_TOLERANCE = 0.02
SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])


def _all_cases(rank):
    return {
        (name, sequence_parallel, dtype): _run(rank, fields, sequence_parallel, dtype)
        for name, fields in CASES.items()
        for sequence_parallel in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
    }


def _run(rank, fields, sequence_parallel, dtype=torch.float32):
    return _outcome(fields, split(rank, sequence_parallel=sequence_parallel), dtype)


def _outcome(fields, tensor_parallel, dtype=torch.float32):
    decoder = build(fields, tensor_parallel, dtype)
    return *loss_and_gradients(decoder, tensor_parallel), parameter_placements(decoder)


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, _all_cases)


def reference(fields, dtype=torch.float32):
    """Loss and gradients of the decoder in one piece; the loss is torch's own."""
    torch.manual_seed(0)
    decoder = build(fields, dtype=dtype)
    inputs, labels, mask = batch()
    losses = F.cross_entropy(decoder(inputs).float().flatten(0, 1), labels.flatten(), reduction="none")
    loss = losses[mask.flatten() == 1].mean()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in decoder.named_parameters()}


def assert_equal_to_one_piece(results, fields):
    loss, gradients = reference(fields)
    placements = results[0][2]
    assert placements.keys() == gradients.keys()
    for split_loss, _, _ in results:
        assert split_loss == pytest.approx(loss, rel=FP32_TOLERANCE)
    for name, expected in gradients.items():
        actual = whole([result[1][name] for result in results], placements[name])
        tolerance = FP32_TOLERANCE * expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=FP32_TOLERANCE, atol=tolerance, msg=lambda m, n=name: n + m)


def assert_copies_identical(results):
    for name, placement in results[0][2].items():
        if placement.split_dim is None and not placement.partial_gradient:
            for _, gradients, _ in results[1:]:
                assert torch.equal(gradients[name], results[0][1][name]), name


@SEQUENCE_PARALLEL
@pytest.mark.parametrize("case", CASES)
def test_two_tensor_ranks_equal_one(case, sequence_parallel, two_ranks):
    results = [rank[case, sequence_parallel, torch.float32] for rank in two_ranks]
    assert_equal_to_one_piece(results, CASES[case])
    assert_copies_identical(results)


@SEQUENCE_PARALLEL
@pytest.mark.parametrize("case", CASES)
def test_two_tensor_ranks_equal_one_in_bf16(case, sequence_parallel, two_ranks):
    results = [rank[case, sequence_parallel, torch.bfloat16] for rank in two_ranks]
    loss, gradients = reference(CASES[case])
    _, rounded = reference(CASES[case], torch.bfloat16)
    assert results[0][0] == pytest.approx(loss, rel=1e-3)
    for name, expected in gradients.items():
        actual = whole([result[1][name].float() for result in results], results[0][2][name])
        allowed = 2 * (rounded[name].float() - expected).norm() + BF16_TOLERANCE * expected.norm()
        assert expected.numel() == 1 or (actual - expected).norm() <= allowed, name
    assert_copies_identical(results)


def _four_ways(rank):
    return [_run(rank, FOUR_WAYS, sequence_parallel) for sequence_parallel in (False, True)]


def test_four_tensor_ranks_equal_one():
    ranks = run_ranks(4, _four_ways)
    for mode in range(2):
        results = [rank[mode] for rank in ranks]
        assert_equal_to_one_piece(results, FOUR_WAYS)
        assert_copies_identical(results)


TWO_MODELS = [FOUR_WAYS, CASES["tied head"]]


def _two_by_two(rank):
    grid = build_grid(pipe_parallel_size=1, model_parallel_size=2)
    tensor_parallel = TensorParallel(grid.tensor.rank, grid.tensor.size, grid.tensor.handle, sequence_parallel=True)
    return _outcome(TWO_MODELS[grid.data.rank], tensor_parallel)


def test_two_tensor_groups_of_a_grid_do_not_mix():
    ranks = run_ranks(4, _two_by_two)
    for results, fields in zip((ranks[:2], ranks[2:]), TWO_MODELS, strict=True):
        assert_equal_to_one_piece(results, fields)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fields", [*CASES.values(), FOUR_WAYS], ids=[*CASES, "four ways"])
def test_starting_weights_do_not_depend_on_the_tensor_size(fields, size):
    fields = {**fields, "num_attention_heads": 8, "num_kv_heads": 4}
    decoders = [build(fields, TensorParallel(rank, size)) for rank in range(size)]
    placements = parameter_placements(decoders[0])
    for name, expected in build(fields).named_parameters():
        parts = [decoder.get_parameter(name).detach() for decoder in decoders]
        if placements[name].split_dim is None:
            assert all(torch.equal(part, expected) for part in parts), name
        else:
            assert torch.equal(whole(parts, placements[name]), expected), name


def _recomputed_and_not(rank):
    found = {}
    for sequence_parallel in (False, True):
        tensor_parallel = split(rank, sequence_parallel=sequence_parallel)
        for recompute in (False, True):
            fields = {**CASES["learned positions, gelu, biases"], **DROPOUT, "checkpoint_activations": recompute}
            found[sequence_parallel, recompute] = loss_and_gradients(build(fields, tensor_parallel), tensor_parallel)
        decoder = build({**fields, **dict.fromkeys(DROPOUT, 0.0)}, tensor_parallel)
        found[sequence_parallel, "no dropout"] = loss_and_gradients(decoder, tensor_parallel)
        found[sequence_parallel, "placements"] = parameter_placements(decoder)
    return found


def test_recomputation_replays_the_dropout_of_every_stream():
    ranks = run_ranks(2, _recomputed_and_not)
    for sequence_parallel in (False, True):
        for rank in ranks:
            loss, gradients = rank[sequence_parallel, False]
            loss_again, gradients_again = rank[sequence_parallel, True]
            assert loss == loss_again != rank[sequence_parallel, "no dropout"][0]
            for name, gradient in gradients.items():
                assert torch.equal(gradient, gradients_again[name]), name
        placements = ranks[0][sequence_parallel, "placements"]
        assert_copies_identical([(*rank[sequence_parallel, True], placements) for rank in ranks])


def _generate(rank):
    tensor_parallel = split(rank, sequence_parallel=False)
    return _completions(build({"num_kv_heads": 2, "init_method_std": 0.4}, tensor_parallel), tensor_parallel)


def _completions(decoder, tensor_parallel):
    settings = DecodeSettings(Sampling(), maximum_tokens=8, max_length=SEQ_LENGTH, eod=0, vocab_size=96)
    completions = generate_tokens(
        lambda fed, cache: gather_logits(decoder.eval()(fed, cache), tensor_parallel),
        [[5, 6, 7], [9]],
        settings,
        generators=[torch.Generator(), torch.Generator()],
        make_cache=KVCache,
    )
    return [completion.tokens for completion in completions]


def test_text_is_the_same_from_two_tensor_ranks():
    expected = _completions(build({"num_kv_heads": 2, "init_method_std": 0.4}), NOT_SPLIT)
    assert run_ranks(2, _generate) == [expected, expected]
