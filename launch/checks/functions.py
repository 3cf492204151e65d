"""Checks that the functions named by a topology can be used. Users' modules are never imported by the launcher itself,
but by a separate process, which is killed if it hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from launch.processes.programs import child_environment
from services.rollout.user_code.load import Wanted, is_inline, problem
from shared.rpc.errors import RpcError
from shared.topology import Topology
from shared.topology.algorithm import is_function

LIMIT_S = 60.0
"""Maximum seconds for importing all functions. A rollout allows the same time for importing users' modules."""
_END_S = 10.0
REMEDY = {
    "reward": "correct {key} or its params",
    "workflow": "correct {key} or workflow.params",
    "advantage": "correct {key} or algorithm.advantage.params",
    "token advantage": "correct {key} or algorithm.advantage.params",
    "loss": "correct {key} or algorithm.loss.params",
}


def problems(topology: Topology) -> Iterator[str]:
    """Yield a line for each function that cannot be used. The line gives its key, its path, the reason and a remedy."""
    others: list[Wanted] = []
    for wanted in named_functions(topology):
        missing = _missing_module(wanted)
        if missing:
            yield missing
        elif _is_ours(wanted):
            yield from _error_lines(wanted, problem(wanted))
        else:
            others.append(wanted)
    if others:
        for wanted, why in zip(others, _check_in_process(others), strict=True):
            yield from _error_lines(wanted, why)


def named_functions(topology: Topology) -> Iterator[Wanted]:
    """Yield every function that the topology names by import path."""
    reward, workflow, algorithm = topology.reward, topology.workflow, topology.algorithm
    for index, term in enumerate(reward.terms):
        key = "reward.function" if reward.function is not None else f"reward.functions[{index}].function"
        yield Wanted(key, "reward", term.function, term.params)
    if workflow is not None:
        yield Wanted("workflow.function", "workflow", workflow.function, workflow.params)
    if is_function(algorithm.advantage.name):
        kind = "token advantage" if algorithm.advantage.per_token else "advantage"
        yield Wanted("algorithm.advantage.name", kind, algorithm.advantage.name, algorithm.advantage.params)
    if is_function(algorithm.loss.name):
        yield Wanted("algorithm.loss.name", "loss", algorithm.loss.name, algorithm.loss.params)


def _missing_module(wanted: Wanted) -> str:
    """Return the error line for a module that cannot be found. This check needs no separate process."""
    module, _, function = wanted.path.partition(":")
    top, folder = module.partition(".")[0], Path.cwd()
    if module == "builtin" or (folder / top).is_dir() or (folder / f"{top}.py").is_file() or find_spec(top):
        return ""
    return (
        f"{wanted.key}: {wanted.path!r}: no module {top!r} in {folder} or on Python's path; start from the folder of "
        f"the {top}.py that defines {function!r}, or set PYTHONPATH"
    )


def _is_ours(wanted: Wanted) -> bool:
    """Return whether the check runs only our code and imports no library. This is also true of unknown builtins."""
    try:
        return wanted.kind == "reward" and is_inline(wanted.path)
    except RpcError:
        return True


def _error_lines(wanted: Wanted, why: str) -> Iterator[str]:
    if why:
        yield f"{wanted.key}: {why}; {REMEDY[wanted.kind].format(key=wanted.key)}"


def _check_in_process(functions: Sequence[Wanted]) -> list[str]:
    """Check `functions` in a separate process.

    Return, for each function, the reason why it cannot be used, or an empty string if it can.
    """
    ours, theirs = socket.socketpair()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.rollout.user_code.load", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # A module's output would appear among our lines.
            pass_fds=(theirs.fileno(),),
            env=child_environment(1),
            start_new_session=True,
        )
    finally:
        theirs.close()
    answered: list[str] = []
    try:
        ours.settimeout(LIMIT_S)
        with ours, ours.makefile("rb") as answers:
            ours.sendall(json.dumps(msgspec.to_builtins(functions), default=str).encode())
            ours.shutdown(socket.SHUT_WR)
            for line in answers:
                answered.append(str(json.loads(line)))
        how = "its module ends the process that imports it"
    except (TimeoutError, OSError, ValueError):
        how = f"its module is still being imported after {LIMIT_S:g} s"
    finally:
        _end(child)
    # The first function without an answer is the culprit; the others are checked next time.
    if len(answered) < len(functions):
        answered.append(f"{functions[len(answered)].path!r}: {how}")
    return answered + [""] * (len(functions) - len(answered))


def _end(child: subprocess.Popen[Any]) -> None:
    """Stop the process, which is a subreaper and therefore also stops everything that users' code has started."""
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
