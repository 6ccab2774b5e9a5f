"""One worker of a training run: under deepy, torchrun, srun or mpirun, or alone."""

import sys

from megatron.launch.command_line import arguments_from_command_line
from megatron.launch.exit_record import failures_recorded
from megatron.launch.exit_status import run_worker


def main() -> int:
    """Train, and return the exit status."""
    args, rank = arguments_from_command_line(sys.argv[1:], __doc__)
    with failures_recorded(args.monitor.log_dir, rank.rank):
        # Imported when the arguments are known to be good: torch takes seconds.
        from megatron.training.run import train_run

        return train_run(args, rank)


if __name__ == "__main__":
    run_worker(main)
