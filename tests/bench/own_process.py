"""Runs the checks of `smoke_gpu` and the parts of `bench_gpu`, each in a process of its own and with a limit in
seconds, and prints a JSON line for each. Machines with GPUs may lack parts of the environment, so a package that is not
installed leaves out what needs it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Measured = dict[str, Any]
LEFT_OUT = 77
"""Exit status of a process that needs something that this machine lacks. The last line of its output says what is
missing."""
NO_TIME = "no time is left"
SMALL = "BENCH_SMALL"
"""Environment variable with which a GPU is given work as small as a CPU: `--small`."""
_OURS = ("proto", "shared", "services", "launch", "tests")
_NOT_INSTALLED = re.compile(r"ModuleNotFoundError: No module named '([^'.]+)")


class Missing(Exception):
    """This machine lacks what a check needs."""


def full_size(device: str) -> bool:
    """Return whether `device` is given work of a GPU's size."""
    return device.startswith("cuda") and SMALL not in os.environ


def not_installed(text: str) -> str:
    """Return the name of the package whose absence a traceback reports, or "" if it reports something else."""
    found = _NOT_INSTALLED.search(text)
    return found[1] if found is not None and found[1] not in _OURS else ""


def run(command: Sequence[str], line: Measured, limit_s: float) -> Measured:
    """Run one process. Return `line` with `ok` (None if something is missing), `seconds`, and what it measured."""
    line = line | {"ok": False}
    began = time.monotonic()
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
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
    if name := not_installed(last):
        return line | {"ok": None, "left_out": f"not installed: {name}"}
    return line | {"error": last[:500]}


def run_forked(function: Callable[[], Measured], line: Measured, limit_s: float) -> Measured:
    """Call a function in a fork of this process. Return `line` as `run` does.

    The fork has the libraries that this process has imported, whose import takes longer than a small measurement.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function))
    began = time.monotonic()
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(limit_s) else {"error": f"not done within {limit_s:.0f} s"}
    except EOFError:
        answer = {"error": "the process died"}
    if "error" in answer and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return line | {"ok": False, "seconds": round(time.monotonic() - began, 1)} | answer


def _send(sender: Connection, function: Callable[[], Measured]) -> None:
    os.setsid()
    os.dup2(2, 1)  # the standard output is for the lines of the whole
    try:
        sender.send({"ok": True, **function()})
    except Missing as missing:
        sender.send({"ok": None, "left_out": str(missing)})
    except Exception as error:
        sender.send({"error": f"{type(error).__name__}: {error}"[:500]})
        raise


def run_all(
    kind: str,
    limits_s: Mapping[str, float],
    run_one: Callable[[str, Measured, float], Measured],
    whole_s: float,
    goals: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run the processes one after the other for at most `whole_s` seconds, and print their lines with their goals.
    Return the exit status.
    """
    until = time.monotonic() + whole_s
    lines: list[Measured] = []
    for name, limit_s in limits_s.items():
        left_s = until - time.monotonic()
        line: Measured = {kind: name, "ok": None, "left_out": NO_TIME}
        if left_s > 1:
            line = run_one(name, {kind: name}, min(limit_s, left_s))
            if "not done within" in line.get("error", "") and left_s < limit_s:
                line = {kind: name, "ok": None, "left_out": NO_TIME}
        line |= {"goal": goals[name]} if name in goals else {}
        print(json.dumps(line), flush=True)
        lines.append(line)
    return exit_status(lines)


def exit_status(lines: Sequence[Measured]) -> int:
    """Return 0 if something was measured and nothing failed or was left out for lack of time, and 1 otherwise."""
    passed = any(line["ok"] for line in lines)
    failed = any(line["ok"] is False or line.get("left_out") == NO_TIME for line in lines)
    return 1 if failed or not passed else 0


def answer(functions: Mapping[str, Callable[[str], Measured]], name: str, device: str) -> None:
    """Call the function in this process and print what it measured as one line, or exit with LEFT_OUT."""
    import torch

    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise Missing("no CUDA device")
        print(json.dumps(functions[name](device)))
    except Missing as missing:
        print(missing)
        sys.exit(LEFT_OUT)
