"""`.venv-emulated/bin/python -m tests.emulated_gpu COMMAND...` runs a command on a machine with emulated GPUs."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.emulated_gpu.machine import machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulated_gpu")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="order in which late work takes effect")
    parser.add_argument("--prompt", action="store_true", help="let nothing be late")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    with machine(given.gpus, seed=given.seed, late=not given.prompt) as variables:
        return subprocess.run(given.command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
