"""Runs each part that needs a GPU once, in a separate process: `make smoke-gpu`. With `--device cpu`, only the parts
that also work without a GPU are run.

Prints one JSON line for each check as it completes: its name, `ok` (null if it was skipped, with the reason),
`seconds`, and what it measured. All checks together take at most ten minutes. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHOLE_S = 580.0
"""Maximum seconds for all checks together. Checks for which no time is left are skipped."""
LIMITS_S = {
    "versions": 60.0,
    "attention": 120.0,
    "locked_memory": 60.0,
    "device_memory": 60.0,
    "nccl_one_rank": 90.0,
    "megatron_one_rank": 90.0,
    "step_and_publish": 120.0,
    "utilisation": 150.0,
    "colocated_run": 180.0,
    "gpu_tests": 180.0,
}
"""The checks in order, each with its limit in seconds. They are functions of `smoke_checks`."""
WITHOUT_GPU = ("versions", "attention", "locked_memory", "step_and_publish", "utilisation")
LEFT_OUT = 77
"""Exit status of a check that needs something that this machine lacks. The last line of its output says what is
missing."""


def run(name: str, device: str, limit_s: float) -> dict[str, Any]:
    """Run one check and return its line."""
    line: dict[str, Any] = {"check": name, "ok": False}
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.bench.smoke_checks", name, device]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # This also kills the processes that the check has started.
            return line | {"seconds": round(limit_s, 1), "error": f"not done within {limit_s:.0f} s"}
    line["seconds"] = round(time.monotonic() - began, 1)
    said = output.splitlines()[-1] if output.strip() else ""
    if process.returncode == 0:
        return line | {"ok": True, **json.loads(said)}
    if process.returncode == LEFT_OUT:
        return line | {"ok": None, "left_out": said}
    last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return line | {"error": last[:500]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.smoke_gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(LIMITS_S), nargs="+", default=tuple(LIMITS_S), metavar="CHECK")
    given = parser.parse_args()
    until = time.monotonic() + WHOLE_S
    failed = passed = False
    for name, limit_s in LIMITS_S.items():
        if name not in given.only or (given.device == "cpu" and name not in WITHOUT_GPU):
            continue
        left_s = until - time.monotonic()
        line: dict[str, Any] = {"check": name, "ok": None, "left_out": "no time is left"}
        if left_s > 1:
            line = run(name, given.device, min(limit_s, left_s))
            if "not done within" in line.get("error", "") and left_s < limit_s:
                line = {"check": name, "ok": None, "left_out": "no time is left"}
        print(json.dumps(line), flush=True)
        failed |= line["ok"] is False
        passed |= line["ok"] is True
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
