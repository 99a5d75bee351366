"""`mpipar` and `python -m mpipar`: every command runs inside the guard."""

from mpipar.cli import main as run_command
from mpipar.run.process.session import guard


def main() -> None:
    """Run the console script; does not return."""
    guard(run_command)


if __name__ == "__main__":
    main()
