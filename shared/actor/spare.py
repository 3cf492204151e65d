"""A spare process: it has imported what a service needs, and becomes that service when the supervisor orders it to.

    python -m shared.actor.spare DESCRIPTOR ...

DESCRIPTOR is one end of a socket pair that keeps message boundaries; further arguments are only for people to read.
Messages are JSON. The spare receives the list of its imports, each `module` or `module:function` (called without
arguments). When they are done, it answers with an empty list. It then takes one order: the module of the service and
its arguments, together with the descriptor of its output. The module runs as it would under `python -m`. Before the
order, a spare knows neither the keys nor the data of a run. It exits when its supervisor does: the other end of the
pair closes.

A spare imports at the lowest priority (SCHED_IDLE): only while its core is otherwise idle. With a nice value of 19, its
imports slowed down a quickstart on two cores by a tenth. An unprivileged process may not be able to raise its priority
again, but on Linux each thread has its own priority. The imports therefore run on a thread that ends afterwards, and
the main thread, which becomes the service, keeps its priority. Threads inherit the priority of the thread that starts
them, so a spare is not used if its imports leave threads behind.

Forks of one process that has imported everything would share its memory. But forking is unsafe here: the child of a
process with torch, OpenMP or engine threads inherits the locks that these threads held, but not the threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from shared.actor.process import die_with_parent

MESSAGE_BYTES = 64 << 10
"""Maximum size of a message."""
_ARG_START, _ARG_END = 45, 46
"""Indices of the /proc/self/stat fields after the name that hold the address range of the command line (proc(5))."""


def main() -> None:
    die_with_parent()
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    supervisor.set_inheritable(False)
    imports = _receive(supervisor)[0]
    importing = threading.Thread(target=_import, args=(imports, supervisor), name="imports", daemon=True)
    importing.start()
    (module, *arguments), output = _receive(supervisor)
    importing.join()
    supervisor.close()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    _show([sys.executable, "-m", module, *arguments])
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _receive(supervisor: socket.socket) -> tuple[list[str], int]:
    """Return the next message and its descriptor (-1 if it has none). Exit if the supervisor has closed its end."""
    message, descriptors, _, _ = socket.recv_fds(supervisor, MESSAGE_BYTES, 1)
    if not message:
        os._exit(0)  # at once: the imports may be under way
    return json.loads(message), descriptors[0] if descriptors else -1


def _import(names: Sequence[str], supervisor: socket.socket) -> None:
    """Import `names` at the lowest priority and tell the supervisor. On any failure, exit with status 1."""
    own = threading.get_native_id()
    os.sched_setscheduler(own, os.SCHED_IDLE, os.sched_param(0))
    try:
        for name in names:
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        if left := threads_of_lowest_priority() - {own}:
            raise RuntimeError(f"the imports have left {len(left)} threads behind, which keep the lowest priority")
        supervisor.send(b"[]")
    except BrokenPipeError:
        return  # the supervisor is gone; the main thread notices it, too
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def threads_of_lowest_priority() -> set[int]:
    """Return the ids of the threads of this process that have the lowest priority."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(int(task.name)) == os.SCHED_IDLE:
                found.add(int(task.name))
    return found


def _show(command: Sequence[str]) -> None:
    """Have `ps` show `command`, as after a cold start, cut off at the length of the spare's own command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    text = b"\0".join(os.fsencode(each) for each in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
