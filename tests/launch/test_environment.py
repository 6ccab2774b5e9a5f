"""Ranks and addresses from what launchers put into the environment."""

import socket

import pytest

from megatron.errors import ConfigError
from megatron.launch.environment import RankInfo, rank_info, started_by_one_launcher
from megatron.launch.ports import free_port, is_free, port_for_job

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
}
# As srun of Slurm 22 sets them for task 4 of `srun -N 3 -n 5` within a larger allocation.
SRUN = {
    "SLURM_JOB_ID": "81",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "gpu[007-010]",
    "SLURM_STEP_NODELIST": "gpu[008-010]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29501"}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def test_torchrun():
    assert rank_info(TORCHRUN) == RankInfo(5, 8, 1, 4, "node0", 29501, "torchrun or DeepSpeed")


def test_deepspeed_names_the_local_size_differently():
    environment = without(TORCHRUN, "LOCAL_WORLD_SIZE") | {"LOCAL_SIZE": "4"}
    assert rank_info(environment).local_world_size == 4


def test_torchrun_with_one_process_meets_where_torchrun_listens():
    one = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert (rank_info(one).master_addr, rank_info(one).master_port) == ("node0", 29501)


def test_one_rank_set_by_hand_needs_no_meeting_point():
    rank = rank_info({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert (rank.master_addr, is_free(rank.master_port)) == ("127.0.0.1", True)


def test_srun_meets_at_the_first_host_of_the_step():
    rank = rank_info(SRUN)
    assert rank == RankInfo(4, 5, 0, 1, "gpu008", rank.master_port, "Slurm")
    first = SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert rank_info(first).master_port == rank.master_port
    assert rank_info(first).local_world_size == 2
    assert rank_info(SRUN | {"SLURM_STEP_ID": "3"}).master_port != rank.master_port


def test_srun_takes_a_meeting_point_that_the_script_exported():
    exported = SRUN | MEETING | {"WORLD_SIZE": "5"}  # as many batch scripts do
    assert (rank_info(exported).rank, rank_info(exported).master_addr) == (4, "node0")
    assert rank_info(exported).master_port == 29501


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("n[03,07-09],m1", "n03"), ("a-b,c[1-2]", "a-b"), ("r[1-2]-ib0,x", "r1-ib0")],
)
def test_first_host_of_a_slurm_list(hosts, first):
    assert rank_info(SRUN | {"SLURM_STEP_NODELIST": hosts}).master_addr == first


def test_srun_on_one_host_needs_no_name_service():
    one_host = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_LOCALID": "4", "SLURM_NODEID": "0"}
    assert rank_info(one_host).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc, where it is a step
        {"SLURM_STEP_ID": "4294967291"},  # a batch script, where it has a step number
        {"SLURM_STEP_ID": None},  # a batch script
        {"SLURM_PROCID": None, "SLURM_STEP_ID": None},  # the shell of salloc on the login node
    ],
)
def test_a_program_in_an_allocation_that_srun_did_not_start_is_alone(changed):
    environment = {name: value for name, value in (SRUN | changed).items() if value is not None}
    assert (rank_info(environment).world_size, rank_info(environment).source) == (1, "alone")
    assert not started_by_one_launcher(environment)


def test_one_task_of_srun_is_a_run_of_one():
    one = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    rank = rank_info(one | {"SLURM_NODEID": "0"})
    assert (rank.rank, rank.world_size, rank.master_addr) == (0, 1, "127.0.0.1")


def test_mpirun_on_one_host():
    rank = rank_info(MPIRUN)
    assert rank == RankInfo(1, 2, 1, 2, "127.0.0.1", rank.master_port, "Open MPI")
    assert rank_info(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"}).master_port == rank.master_port


def test_mpirun_inside_a_slurm_job_counts_its_own_processes():
    # Its daemons are Slurm tasks, one a host, whose variables its processes inherit.
    assert rank_info(SRUN | MPIRUN).source == "Open MPI"


def test_mpirun_on_several_hosts_needs_a_meeting_point():
    several = MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is not set .* Open MPI .* 4 processes"):
        rank_info(several)
    assert rank_info(several | MEETING).master_addr == "node0"


def test_mpich():
    assert rank_info(HYDRA | MEETING) == RankInfo(1, 4, 1, 2, "node0", 29501, "MPICH or Intel MPI")


def test_pmi_of_slurm_is_slurm():
    assert rank_info(SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}).source == "Slurm"


@pytest.mark.parametrize("left_over", [{}, MEETING, {"LOCAL_RANK": "0"}, {"SLURM_JOB_ID": "81", "SLURM_NTASKS": "4"}])
def test_without_a_launcher_a_process_is_alone_at_a_free_port(left_over):
    rank = rank_info(left_over)
    assert rank == RankInfo(0, 1, 0, 1, "127.0.0.1", rank.master_port, "alone")
    assert is_free(rank.master_port)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "RANK and LOCAL_RANK are set .*, but WORLD_SIZE is not"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE and LOCAL_RANK are set .*, but RANK is not"),
        (without(TORCHRUN, "LOCAL_RANK", "WORLD_SIZE"), "RANK is set .*, but WORLD_SIZE and LOCAL_RANK are not"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8 of WORLD_SIZE 8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN | {"RANK": ""}, "RANK is ''"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4 of LOCAL_WORLD_SIZE 4"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not"),
    ],
)
def test_an_environment_that_is_half_set_or_contradicts_itself_is_refused_by_name(environment, message):
    with pytest.raises(ConfigError, match=message):
        rank_info(environment)


def test_ranks_started_by_hand_have_a_shell_for_a_parent():
    assert not started_by_one_launcher(TORCHRUN)
    assert started_by_one_launcher(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})
    assert started_by_one_launcher(SRUN)
    assert started_by_one_launcher(MPIRUN)


def test_free_ports_differ_and_lie_where_the_kernel_draws_none():
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 15
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:  # noqa: PTH123
        assert max(ports) < int(file.read().split()[0])


def test_a_port_somebody_listens_on_is_not_free():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not is_free(listener.getsockname()[1])


def test_jobs_hardly_share_a_port():
    ports = [port_for_job(f"{job}/0") for job in range(100_000, 100_200)]
    assert len(set(ports)) >= 190
    assert all(10_000 <= port < 30_000 for port in ports)
