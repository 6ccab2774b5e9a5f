"""Ranks from the environment of each launcher; half of one is refused."""

import pytest

from megatron.errors import ConfigError
from megatron.launch.environment import free_port, rank_info

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29501"}
ADDRESS = {"MASTER_ADDR": "host", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    "environment",
    [
        TORCH,
        {**TORCH, "LOCAL_WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", **ADDRESS},
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            **ADDRESS,
        },
    ],
)
def test_each_launcher_is_understood(environment):
    info = rank_info(environment)
    assert (info.rank, info.world_size, info.local_rank) == (3, 4, 1)
    assert (info.master_addr, info.master_port) == ("host", 29501)


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"LOCAL_RANK": "0"}, {"MASTER_ADDR": "elsewhere"}],
)
def test_without_a_launcher_a_process_is_alone(environment):
    info = rank_info(environment)
    assert (info.rank, info.world_size, info.master_addr) == (0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"RANK": None}, "RANK"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"RANK": "four"}, "four"),
        ({"RANK": "4"}, "WORLD_SIZE 4"),
    ],
)
def test_half_of_a_launchers_variables_is_refused_by_name(changes, word):
    environment = {key: value for key, value in {**TORCH, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=word):
        rank_info(environment)


def test_free_ports_can_be_listened_on():
    assert 1024 <= free_port() < 65536
