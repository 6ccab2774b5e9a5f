"""What is started, and with what: hand-over, local and multi-host commands, statuses from what workers leave."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.launch.exit_status import ExitRecord, status_of_run, write_exit_record
from megatron.launch.hand_over import OPTION, pack, unpack
from megatron.launch.hosts import planned_world_size, read_hostfile, runner_command, uses_several_hosts
from megatron.launch.local import local_command
from megatron.neox_arguments.launch import LaunchArgs

_text = st.text(max_size=20)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["a path", 'quote\'d "x"', "ünï=code", "k"]), _values))
def test_any_configuration_survives_the_hand_over(flat):
    option, _, payload = pack(flat).partition("=")
    assert option == OPTION
    assert unpack(payload) == flat


@pytest.mark.parametrize("flat", [{"wandb_api_key": "x"}, {"a": {"auth_token": 1}}, {"Password": "x"}])
def test_secrets_do_not_go_on_a_command_line(flat):
    with pytest.raises(ConfigError, match="secret"):
        pack(flat)


def test_names_that_only_contain_such_a_word_are_fine():
    assert pack({"tokenizer_type": "x", "maximum_tokens_seen": 3, "keep_last_n_checkpoints": 1})


@pytest.mark.parametrize("payload", ["", "not base64!", base64.urlsafe_b64encode(b"[1]").decode()])
def test_anything_else_is_refused(payload):
    with pytest.raises(ConfigError, match=OPTION):
        unpack(payload)


def test_the_local_command_starts_that_many_workers():
    command = local_command("train.py", ["--megatron_config=x"], 3, LaunchArgs(master_port=1234))
    world = next(word for word in command if word.startswith("--world_info="))
    decoded = json.loads(base64.urlsafe_b64decode(world.partition("=")[2]))
    assert decoded == {"localhost": [0, 1, 2]}
    assert "--master_port=1234" in command
    assert command[-2:] == ["train.py", "--megatron_config=x"]
    other = local_command("train.py", [], 1, LaunchArgs())
    assert any(word.startswith("--master_port=") for word in other)


def _hostfile(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    return str(path)


def test_a_hostfile_gives_the_world_size_and_the_runner_its_options(tmp_path):
    path = _hostfile(tmp_path, "# two hosts\na slots=2\n\nb slots=4 # big\n")
    assert read_hostfile(path) == {"a": 2, "b": 4}
    launch = LaunchArgs(hostfile=path, num_nodes=2, num_gpus=3, include="a@b:0,1", launcher="openmpi")
    assert uses_several_hosts(launch)
    assert planned_world_size(launch) == 5
    command = runner_command("train.py", ["--x=1"], launch)
    for word in (f"--hostfile={path}", "--include=a@b:0,1", "--num_nodes=2", "--num_gpus=3", "--launcher=openmpi"):
        assert word in command
    assert command[-2:] == ["train.py", "--x=1"]
    slurm = runner_command("train.py", [], LaunchArgs(deepspeed_slurm=True, comment="c", account="a"))
    assert "--launcher=slurm" in slurm and "--launcher_args=--comment=c --account=a" in slurm


@pytest.mark.parametrize(
    ("text", "word"),
    [("a\n", ":1"), ("a slots=2\na slots=2\n", ":2"), ("", "no host"), ("a slots=two", ":1")],
)
def test_a_hostfile_that_cannot_be_used_is_refused_with_its_line(tmp_path, text, word):
    with pytest.raises(ConfigError, match=word):
        read_hostfile(_hostfile(tmp_path, text))
    with pytest.raises(ConfigError, match="nowhere"):
        read_hostfile("nowhere")


@pytest.mark.parametrize(
    ("left", "launcher_status", "status"),
    [
        ([0, 0], 0, 0),
        ([75, 75], 75, 75),
        ([75], 1, 1),
        ([75], 75, 1),
        ([2, 2], 2, 2),
        ([2], 1, 2),
        ([2, 1], 1, 2),
        ([0], 0, 1),
        ([0], 137, 137),
        ([], 0, 1),
        ([1], 1, 1),
        ([75, 1], 1, 1),
        ([0, 139], 1, 139),
    ],
)
def test_the_status_of_a_run_is_never_0_unless_every_worker_said_so(tmp_path, left, launcher_status, status):
    for rank, code in enumerate(left):
        (tmp_path / f"status_{rank}").write_text(str(code))
    assert status_of_run(tmp_path, 2, launcher_status) == status


def test_the_exit_record_is_written_whole(tmp_path):
    write_exit_record(tmp_path / "logs", ExitRecord(75, "was asked to stop", 12, "SIGTERM"))
    read = json.loads((tmp_path / "logs" / "exit.json").read_text())
    assert read == {"code": 75, "reason": "was asked to stop", "iteration": 12, "signal": "SIGTERM"}
