"""A worker that ends as BEHAVIOUR says, one word a rank. No torch: it starts quickly."""

import os
import signal
import sys

from megatron.errors import ConfigError, DataError
from megatron.launch.command_line import arguments_from_command_line
from megatron.launch.exit_record import failures_recorded
from megatron.launch.exit_status import run_worker


def say(text):
    sys.stdout.write(f"{text}\n")  # one write, so that workers' lines do not mix
    sys.stdout.flush()


def wait_for_signal(number):
    """Block until the signal comes, saying how often it came."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    yield
    while True:
        say(f"heard {signal.sigwait({number}).name}")
        yield


def behave(word):
    if word == "wait":
        signal.pause()
    elif word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "again":
        return 75
    elif word == "config":
        raise ConfigError("the lamp is not a lamp")
    elif word == "data":
        raise DataError("the tape is torn")
    elif word == "raise":
        raise RuntimeError("a fault")
    return 0


def main():
    args, rank = arguments_from_command_line(sys.argv[1:], __doc__)
    word = os.environ["BEHAVIOUR"].split(",")[rank.rank]
    signals = wait_for_signal(signal.SIGTERM if word == "listen" else signal.SIGINT)
    next(signals)
    said = {"rank": rank.rank, "size": rank.world_size, "pid": os.getpid(), "port": rank.master_port}
    said |= {"path": args.data.data_path, "threads": os.environ["OMP_NUM_THREADS"], "source": rank.source}
    with failures_recorded(args.monitor.log_dir, rank.rank):
        say(f"ready {said!r}")
        if word in ("save", "listen"):
            next(signals)
            return 75
        if word == "stubborn":
            for _ in signals:
                pass
        return behave(word)


if __name__ == "__main__":
    run_worker(main)
