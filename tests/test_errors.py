"""How a program ends."""

import pytest

from megatron.errors import CheckpointError, ConfigError, DataError, run_main


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize("error", [ConfigError("bad key"), DataError("bad key"), CheckpointError("bad key")])
def test_user_error_is_one_message_and_status_2(error, capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(raising(error))
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "error: bad key\n")


def test_fault_keeps_its_traceback():
    with pytest.raises(KeyError):
        run_main(raising(KeyError("x")))


def test_interrupt_ends_without_traceback(capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(raising(KeyboardInterrupt()))
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (75, 75)])
def test_status_of_main_is_handed_on(returned, status):
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: returned)
    assert ended.value.code == status
