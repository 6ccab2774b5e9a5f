"""Hosts, slots and commands, against what DeepSpeed 0.19.8 makes of the same arguments."""

import sys

import pytest
from deepspeed.launcher import launch as deepspeed_launch
from deepspeed.launcher import runner as deepspeed_runner

from megatron.errors import ConfigError
from megatron.launch.devices import LocalDevices, local_devices
from megatron.launch.hosts import chosen_slots, is_local, planned_world_size, read_hostfile, runner_command
from megatron.launch.local import local_command, num_local_workers
from megatron.launch.ports import is_free
from megatron.neox_arguments.launch import LaunchArgs

HOSTFILE = """# our cluster
worker-0 slots=4

  worker-1   slots=2
worker-2 slots=3
"""
NOTHING = LocalDevices(0, False, None)


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "host file"
    path.write_text(HOSTFILE)
    return str(path)


def of_deepspeed(launch):
    """The slots DeepSpeed's runner would use."""
    pool = deepspeed_runner.fetch_hostfile(launch.hostfile)
    active = deepspeed_runner.parse_inclusion_exclusion(pool, launch.include or "", launch.exclude or "")
    active = deepspeed_runner.apply_num_nodes_and_gpus(active, launch.num_nodes, launch.num_gpus or -1)
    return {host: tuple(slots) for host, slots in active.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_nodes": 2},
        {"num_gpus": 2},
        {"num_nodes": 1, "num_gpus": 1},
        {"include": "worker-2@worker-0:3,1"},
        {"include": "worker-1:1@worker-1:0"},
        {"exclude": "worker-1"},
        {"exclude": "worker-0:0,2@worker-2"},
        {"exclude": "worker-1:0,1"},
    ],
)
def test_chosen_slots_are_deepspeeds(hostfile, settings):
    launch = LaunchArgs(hostfile=hostfile, **settings)
    assert list(chosen_slots(launch).items()) == list(of_deepspeed(launch).items())
    assert planned_world_size(launch) == sum(map(len, of_deepspeed(launch).values()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 4}, "num_nodes is 4, but the hostfile has 3 hosts"),
        ({"num_gpus": 3}, "num_gpus is 3, but worker-1 has 2 slots"),
        ({"include": "worker-9"}, "no worker-9; it has worker-0, worker-1, worker-2"),
        ({"exclude": "worker-1:2"}, "worker-1 has slots 0 to 1"),
        ({"include": "worker-1:x"}, "write host@host:slot,slot"),
        ({"exclude": "worker-0@worker-1@worker-2"}, "leaves no slot"),
        ({"include": "worker-0", "exclude": "worker-1"}, "only one can be set"),
        ({"include": "worker-0", "num_gpus": 1}, "only one can be set"),
        ({"launcher": "openmpi", "num_gpus": 1}, "launcher openmpi uses the whole hostfile"),
        ({"deepspeed_mpi": True, "include": "worker-0"}, "launcher openmpi uses the whole hostfile"),
    ],
)
def test_what_does_not_fit_the_hostfile_is_refused(hostfile, settings, message):
    with pytest.raises(ConfigError, match=message):
        chosen_slots(LaunchArgs(hostfile=hostfile, **settings))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a slots=1\nb\n", ":2: 'b'"),
        ("a slots=1\na slots=2\n", ":2: 'a slots=2'"),
        ("a slots=0\n", ":1: 'a slots=0'"),
        ("a slots=x\n", ":1: 'a slots=x'"),
    ],
)
def test_a_bad_hostfile_is_refused_by_line(tmp_path, text, message):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(str(tmp_path / "hosts"))


def test_a_missing_hostfile_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="no such hosts"):
        read_hostfile(str(tmp_path / "no such hosts"))


@pytest.mark.parametrize(
    "settings",
    [{"num_nodes": 2}, {"include": "a"}, {"exclude": "a"}, {"deepspeed_slurm": True}, {"force_multi": True}],
)
def test_several_hosts_without_a_hostfile_are_refused(settings):
    with pytest.raises(ConfigError, match="hostfile"):
        chosen_slots(LaunchArgs(**settings))


@pytest.mark.parametrize(
    ("hosts", "settings", "local"),
    [
        ("localhost slots=2", {}, True),
        ("localhost slots=2", {"force_multi": True}, False),
        ("localhost slots=2", {"launcher": "slurm"}, False),
        ("somewhere-else slots=2", {}, False),
        ("localhost slots=2\nsomewhere-else slots=2", {}, False),
        ("localhost slots=2\nsomewhere-else slots=2", {"num_nodes": 1}, True),
    ],
)
def test_one_host_is_local_only_if_it_is_this_one(tmp_path, hosts, settings, local):
    (tmp_path / "hosts").write_text(hosts)
    launch = LaunchArgs(hostfile=str(tmp_path / "hosts"), **settings)
    assert is_local(chosen_slots(launch), launch) is local


def test_the_runner_understands_our_command(hostfile):
    launch = LaunchArgs(
        hostfile=hostfile,
        num_nodes=2,
        num_gpus=2,
        master_addr="10.0.0.1",
        master_port=29501,
        launcher="slurm",
        comment="it's a run",
        account="them",
        no_ssh_check=True,
    )
    command = runner_command("a script.py", ["--megatron_config=x="], launch)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    parsed = deepspeed_runner.parse_args(command[3:])
    assert (parsed.hostfile, parsed.num_nodes, parsed.num_gpus) == (hostfile, 2, 2)
    assert (parsed.master_addr, parsed.master_port, parsed.launcher) == ("10.0.0.1", 29501, "slurm")
    assert parsed.no_ssh_check and parsed.force_multi
    assert (parsed.user_script, parsed.user_args) == ("a script.py", ["--megatron_config=x="])
    srun = deepspeed_runner.SlurmRunner(parsed, "", {}).get_cmd({}, {"worker-0": [0, 1], "worker-1": [0, 1]})
    assert "--comment=it's a run" in srun and "--account=them" in srun


def test_pdsh_gets_no_slurm_options(hostfile):
    command = runner_command("train.py", [], LaunchArgs(hostfile=hostfile, comment="x"))
    assert deepspeed_runner.parse_args(command[3:]).launcher_args == ""


def test_the_launcher_understands_our_command(monkeypatch):
    command = local_command("a script.py", ["--megatron_config=x="], (0, 1, 2), LaunchArgs(master_addr="127.0.0.2"))
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.launch"]
    monkeypatch.setattr(sys, "argv", command[2:])
    parsed = deepspeed_launch.parse_args()
    assert parsed.master_addr == "127.0.0.2" and is_free(parsed.master_port)
    assert (parsed.training_script, parsed.training_script_args) == ("a script.py", ["--megatron_config=x="])
    world = deepspeed_launch.json.loads(deepspeed_launch.base64.urlsafe_b64decode(parsed.world_info))
    assert [len(slots) for slots in world.values()] == [3]


def test_a_port_in_use_is_refused_by_number():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"master_port {port} is in use"):
            local_command("train.py", [], (0,), LaunchArgs(master_port=port))


@pytest.mark.parametrize(
    ("devices", "num_gpus", "workers"),
    [
        (NOTHING, None, 1),
        (NOTHING, 5, 5),
        (LocalDevices(4, True, None), None, 4),
        (LocalDevices(4, True, ("2", "3")), None, 2),
        (LocalDevices(4, True, ("2", "3")), 1, 1),
        (LocalDevices(4, True, ()), 6, 6),  # hidden devices: on the CPU
    ],
)
def test_number_of_workers(monkeypatch, devices, num_gpus, workers):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert num_local_workers(LaunchArgs(num_gpus=num_gpus), devices) == workers


def test_more_workers_than_devices_are_refused(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(ConfigError, match=r"num_gpus is 3, but this host has 2 to use \(CUDA_VISIBLE_DEVICES is 2,3\)"):
        num_local_workers(LaunchArgs(num_gpus=3), LocalDevices(4, True, ("2", "3")))


@pytest.mark.parametrize(
    ("variable", "slots", "names"),
    [
        (None, (0, 1), ["0", "1"]),
        ("2,3", (0, 1), ["2", "3"]),
        ("2, 3", (1,), ["3"]),
        ("GPU-8a,GPU-1b", (0, 1), ["GPU-8a", "GPU-1b"]),
        ("1,-1,0", (0,), ["1"]),
        ("", (0, 1), ["-1", "-1"]),
        ("-1", (0,), ["-1"]),
    ],
)
def test_workers_see_the_devices_that_this_process_sees(monkeypatch, variable, slots, names):
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert local_devices().names(slots) == names
