"""Bring this process into the run: device, process group, random streams."""

from __future__ import annotations

import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.launch.environment import RankInfo
from megatron.neox_arguments.parallelism import ParallelismArgs


def join_ranks(parallelism: ParallelismArgs, rank: RankInfo) -> torch.device:
    """Initialise the default process group and return this rank's device.

    Collective over the world. A collective that takes longer than `distributed_timeout_seconds` fails on every rank.
    Raises ConfigError when the ranks cannot meet.
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
    try:
        dist.init_process_group(
            backend=parallelism.distributed_backend or dist.get_default_backend_for_device(device),
            timeout=timedelta(seconds=parallelism.distributed_timeout_seconds),
            device_id=None if device.type == "cpu" else device,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"rank {rank.rank} of {rank.world_size} could not meet the others at {rank.master_addr}, master_port "
            f"{rank.master_port}: {reason}"
        ) from error
    return device


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
