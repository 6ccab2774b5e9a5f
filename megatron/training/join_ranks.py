"""Bring this process into the run: device, process group, random streams."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron.data_parallel.roll_call import RollCall
from megatron.errors import ConfigError
from megatron.launch.environment import RankInfo
from megatron.neox_arguments.parallelism import ParallelismArgs


@dataclass(frozen=True)
class JoinedRank:
    """This rank's device, how long a collective may take, and how to find out who is missing when one fails."""

    device: torch.device
    timeout: timedelta
    roll_call: RollCall


def join_ranks(parallelism: ParallelismArgs, rank: RankInfo) -> JoinedRank:
    """Initialise the default process group.

    Collective over the world. A run with a rank that is lost ends within `distributed_timeout_seconds`, so a collective
    may take that less the time to find out who it is. Raises ConfigError when the ranks cannot meet.
    """
    device = _device(rank)
    # DeepSpeed reads these again; under srun or mpirun nobody has set them.
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        MASTER_ADDR=rank.master_addr,
        MASTER_PORT=str(rank.master_port),
    )
    allowed_s = parallelism.distributed_timeout_seconds
    try:
        store, _, _ = next(dist.rendezvous("env://", rank.rank, rank.world_size, timeout=timedelta(seconds=allowed_s)))
        roll_call = RollCall.within(allowed_s, dist.PrefixStore("roll_call", store))
        timeout = timedelta(seconds=allowed_s - roll_call.patience_s)
        dist.init_process_group(
            backend=parallelism.distributed_backend or dist.get_default_backend_for_device(device),
            store=dist.PrefixStore("default", store),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"rank {rank.rank} of {rank.world_size} could not meet the others at {rank.master_addr}, master_port "
            f"{rank.master_port}: {reason}"
        ) from error
    return JoinedRank(device, timeout, roll_call)


def seed_random_streams(seed: int, *, data_rank: int, stage: int) -> None:
    """Seed dropout and whatever else draws at run time; each data rank and each stage has a stream of its own."""
    mixed = int(np.random.SeedSequence([seed, data_rank, stage]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _device(rank: RankInfo) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, rank.local_rank)
    torch.accelerator.set_device_index(rank.local_rank)
    return device
