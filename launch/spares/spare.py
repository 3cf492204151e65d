"""A spare process has imported what services need, and the services that the supervisor orders are forks of it.

    python -m launch.spares.spare DESCRIPTOR ...

DESCRIPTOR is one end of a socket pair that preserves message boundaries; any further arguments are only for human
readers. Messages are JSON. The spare receives the list of its imports, each `module` or `module:function` (called
without arguments), and answers with an empty list when they are done. Then it takes orders. An order is a pair: the
module of the service with its arguments, and the environment variables that differ from the spare's own. Two
descriptors accompany each order: the output of the service, and one end of another socket pair. Over that pair, the
service sends its process id and waits for an answer. If there is none, the service exits, because the supervisor might
then start it in another way. The module runs as it would under `python -m`. A spare knows neither the keys nor the data
of a run. It exits when its supervisor does, because the other end of its socket pair then closes.

A service is a grandchild of the spare; the process between them has exited. The supervisor is a subreaper (prctl(2)),
so it becomes the service's parent, just as it is the parent of a service that it starts without a spare.

Only a process with one thread can be forked safely: a child inherits the locks that other threads held, but not those
threads. Nor may a GPU driver have been initialized. A spare therefore fails if its imports leave a thread behind or
initialize a driver. Functions that the imports register with `atexit` run at the end of every fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.actor.process import die_with_parent

MESSAGE_BYTES = 64 << 10
"""Maximum size of a message."""
DRIVER_FILES = ("/dev/nvidia-uvm", "/dev/kfd")
"""The files that a process opens when it initializes the CUDA or ROCm driver, but not when it only counts GPUs
through NVML."""
THREADS_END_S = 1.0
"""Maximum time, in seconds, that threads that the imports started and joined may take to disappear from /proc."""
_POLL_S = 0.001
_ARG_START, _ARG_END = 45, 46
"""Indices, among the fields that follow the name in /proc/self/stat, of the two that hold the address range of the
command line (proc(5))."""


def main() -> None:
    die_with_parent()
    supervisor = os.getppid()
    orders = socket.socket(fileno=int(sys.argv[1]))
    orders.set_inheritable(False)
    for name in _receive(orders)[0]:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    until = time.monotonic() + THREADS_END_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(_POLL_S)
    if problem := why_not_to_fork(threads, open_files()):
        sys.exit(f"spare: {problem}")
    # The collector would write to the objects that exist now, and so copy the pages that the forks share.
    gc.collect()
    gc.freeze()
    orders.send(b"[]")
    while True:
        (command, environment), (output, answer) = _receive(orders)
        with socket.socket(fileno=answer) as answering:
            if _forked(supervisor):
                orders.close()
                _become(command, environment, output, answering)
                return
        os.close(output)


def why_not_to_fork(threads: int, files: Sequence[str]) -> str:
    """Return why a process with `threads` threads and these open files cannot be forked, or an empty string."""
    if threads > 1:
        return f"the imports have started {threads - 1} threads, which a fork would lack"
    if opened := [file for file in DRIVER_FILES if file in files]:
        return f"the imports have initialized the driver of a GPU ({opened[0]} is open), which a fork could not use"
    return ""


def open_files(folder: Path = Path("/proc/self/fd")) -> list[str]:
    """Return the targets of the links in `folder`: by default, the open files of this process."""
    targets = []
    for link in folder.iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets.append(os.readlink(link))
    return targets


def _receive(orders: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors. Exit if the supervisor has closed its end."""
    message, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 2)
    if not message:
        os._exit(0)
    return json.loads(message), descriptors


def _forked(supervisor: int) -> bool:
    """Return False in the spare and True in its new grandchild, once the supervisor is the grandchild's parent."""
    try:
        if child := os.fork():
            os.waitpid(child, 0)
            return False
    except OSError:  # The supervisor notices that there is no answer.
        traceback.print_exc()
        return False
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        traceback.print_exc()
        os._exit(1)
    while os.getppid() == between:
        time.sleep(_POLL_S)
    if os.getppid() != supervisor:
        os._exit(0)
    return True


def _become(command: Sequence[str], environment: Mapping[str, str], output: int, answer: socket.socket) -> None:
    """Run the module of `command` with its arguments, if the supervisor still wants the service."""
    os.setpgid(0, 0)
    try:
        answer.send(str(os.getpid()).encode())
        wanted = bool(answer.recv(1))
    except OSError:
        wanted = False
    if not wanted:
        os._exit(0)
    answer.close()
    if "numpy.random" in sys.modules:  # Otherwise all forks would draw the same numbers. `random` does this by itself.
        sys.modules["numpy.random"].seed()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    os.environ.update(environment)
    _show([sys.executable, "-m", *command])
    sys.argv[1:] = command[1:]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _show(command: Sequence[str]) -> None:
    """Make `ps` show `command`, as if it had been started directly, truncated to the length of the spare's own command
    line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    text = b"\0".join(os.fsencode(argument) for argument in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
