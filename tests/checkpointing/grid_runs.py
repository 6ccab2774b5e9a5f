"""A tiny model held by the ranks of any grid, dealt out by plain torch calls: what every layout must agree with."""

from dataclasses import dataclass, field
from itertools import product

import torch

from megatron.checkpointing import (
    GridPosition,
    Holding,
    ParallelSizes,
    RandomState,
    RunState,
    SaveRole,
    Snapshot,
    load_checkpoint,
    save,
)
from megatron.mpu.tensor_parallel import Placement
from tests.checkpointing.runs import blank, blank_state, same_bits

WHOLE, PARTIAL = Placement(), Placement(partial_gradient=True)
ROWS, COLUMNS, GATED = Placement(0), Placement(1), Placement(0, num_fused=2)
EMBEDDING, HEAD = "layers.0.word_embeddings.weight", "layers.4.final_linear.weight"
# Four groups of two query heads, a key and a value head: each tensor rank has whole groups.
BLOCK = {
    "input_layernorm.weight": ((6,), PARTIAL),
    "attention.query_key_value.weight": ((16, 6), ROWS),
    "attention.query_key_value.bias": ((16,), ROWS),
    "attention.dense.weight": ((6, 8), COLUMNS),
    "attention.dense.bias": ((6,), WHOLE),
    "mlp.dense_h_to_4h.weight": ((24, 6), GATED),
    "mlp.dense_h_to_4h.bias": ((24,), GATED),
    "mlp.dense_4h_to_h.weight": ((6, 12), COLUMNS),
}
STAGES = {1: [[0, 1, 2, 3, 4]], 2: [[0, 1], [2, 3, 4]], 4: [[0], [1], [2], [3, 4]]}


def parameters(vocab=12):
    return {
        EMBEDDING: ((vocab, 6), ROWS),
        "layers.0.position_embeddings.weight": ((5, 6), WHOLE),
        **{f"layers.{layer}.{name}": entry for layer in (1, 2) for name, entry in BLOCK.items()},
        "layers.3.norm.weight": ((6,), PARTIAL),
        HEAD: ((vocab, 6), ROWS),
    }


@dataclass(frozen=True)
class Layout:
    """A way to hold the model. `cuts` (fractions of a group's elements) replace an even split by ZeRO."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    zero: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.bfloat16
    vocab: int = 12
    cuts: tuple[float, ...] | None = field(default=None)

    def __str__(self):
        return f"pp{self.pp}tp{self.tp}dp{self.dp}" + "z" * self.zero + "t" * self.tied

    @property
    def grid(self):
        sizes = ParallelSizes(self.pp, self.tp, self.dp)
        axes = product(range(self.pp), range(self.dp), range(self.tp))
        return [GridPosition(stage, data, tensor, sizes) for stage, data, tensor in axes]


def full(name, key, shape):
    """The whole model's values of one tensor: a function of its name only."""
    generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(f"{name}/{key}")))
    return torch.tensor(7.0) if key == "step" else torch.randn(shape, generator=generator)


def tensor_slice(whole, placement, rank, size):
    if placement.split_dim is None or whole.dim() == 0:
        return whole
    blocks = whole.chunk(placement.num_fused, placement.split_dim)
    return torch.cat([block.chunk(size, placement.split_dim)[rank] for block in blocks], placement.split_dim)


@dataclass(frozen=True)
class Rank:
    holding: Holding
    weights: dict
    state: dict

    def blank(self):
        return Rank(self.holding, blank(self.weights), blank_state(self.state))

    def same_as(self, other):
        return self.weights.keys() == other.weights.keys() and all(
            [same_bits(tensor, other.weights[name]) for name, tensor in self.weights.items()]
            + [same_bits(t, other.state[name][key]) for name, state in self.state.items() for key, t in state.items()]
        )


def ranks(layout):
    return [rank_of(layout, position) for position in layout.grid]


def rank_of(layout, position):
    names = names_of_stage(layout, position.stage)
    everything = parameters(layout.vocab)
    placements = {name: everything[name][1] for name in names}
    shards = runs(layout, position) if layout.zero else None

    def local(name, key):
        values = tensor_slice(full(name, key, everything[name][0]), placements[name], position.tensor_rank, layout.tp)
        return values.contiguous()

    keys = ["exp_avg", "exp_avg_sq", "step"] + ["master"] * (layout.dtype != torch.float32)
    state = {}
    for name in names if shards is None else shards:
        state[name] = {key: local(name, key) for key in keys}
        if shards is not None:
            run = shards[name]
            state[name] = {k: t if t.dim() == 0 else t.flatten()[run.start : run.stop] for k, t in state[name].items()}
    holding = Holding(position, placements, shards, STAGES[layout.pp][position.stage])
    return Rank(holding, {name: local(name, "weight").to(layout.dtype) for name in names}, state)


def names_of_stage(layout, stage):
    layers = STAGES[layout.pp][stage]
    names = [name for name in parameters() if int(name.split(".")[1]) in layers]
    if layout.tied and HEAD in names:
        names[names.index(HEAD)] = EMBEDDING
    return list(dict.fromkeys(names))


def runs(layout, position):
    """This rank's part of each group: the group's parameters one behind the other, cut among its ranks."""
    groups = {}
    for name in names_of_stage(layout, position.stage):
        groups.setdefault(group_of(layout, name, position), []).append(name)
    mine = {}
    for group, names in groups.items():
        numels = [local_numel(layout, name) for name in names]
        start, stop = cut(layout, sum(numels), group.index(position), len(group))
        for name, numel in zip(names, numels, strict=True):
            run = range(max(0, min(start, numel)), max(0, min(stop, numel)))
            start, stop = start - numel, stop - numel
            if run:
                mine[name] = run
    return mine


def group_of(layout, name, position):
    """The ranks that hold the same elements and average their gradient."""
    placement = parameters()[name][1]
    spans_stages = layout.tied and name == EMBEDDING and layout.pp > 1
    return tuple(
        other
        for other in layout.grid
        if (other.stage == position.stage or (spans_stages and other.stage in (0, layout.pp - 1)))
        and (other.tensor_rank == position.tensor_rank or placement.partial_gradient)
    )


def local_numel(layout, name):
    shape, placement = parameters(layout.vocab)[name]
    return torch.Size(shape).numel() // (1 if placement.split_dim is None else layout.tp)


def cut(layout, numel, rank, size):
    if layout.cuts is None:
        share = -(-numel // size)
        return rank * share, min(numel, (rank + 1) * share)
    cuts = sorted(round(layout.cuts[i % len(layout.cuts)] * numel) for i in range(size - 1))
    bounds = [0, *cuts, numel]
    return bounds[rank], bounds[rank + 1]


def snapshot_of(rank, seed=0, **changes):
    position = rank.holding.position
    content = {
        "weights": rank.weights,
        "run_state": RunState(5, 40, 4, 1, {"value": 1024.0}),
        "optimizer_state": rank.state,
        "random_state": RandomState.from_seed(seed + 100 * position.stage + position.data_rank),
        "holding": rank.holding,
    }
    return Snapshot(**(content | changes))


def save_grid(root, held, **changes):
    contents = [snapshot_of(rank, **changes) for rank in held]
    roles = [
        SaveRole.of_rank(i, len(held), rank.holding.position, sharded_state=rank.holding.shards is not None)
        for i, rank in enumerate(held)
    ]
    return roles_in_turn(root, contents, roles)


def roles_in_turn(root, contents, roles):
    """Save as several ranks in one process: each rank's part is written while rank 0 waits for them."""
    others = iter(zip(contents[1:], roles[1:], strict=True))
    calls = []

    def agree(ok):
        calls.append(ok)
        if len(calls) == 2:
            for content, role in others:
                save(root, content, role=role, agree=bool)
        return ok

    return save(root, contents[0], role=roles[0], agree=agree)


def load_rank(root, wanted, **arguments):
    """Read what `wanted` holds into blank tensors."""
    target = wanted.blank()
    loaded = load_checkpoint(
        root, weights=target.weights, optimizer_state=target.state, holding=wanted.holding, **arguments
    )
    return loaded, target
