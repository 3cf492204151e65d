"""A spare process: it has imported what a service needs, and becomes that service when the supervisor orders it to.

    python -m shared.actor.spare DESCRIPTOR ...

DESCRIPTOR is one end of a pair of sockets that keep message boundaries; further arguments are for people. Messages are
JSON. The spare receives the list of its imports, `module` or `module:function` (called without arguments), answers with
an empty list when they are done, and then takes one order: the module of the service and its arguments, together with
the descriptor of its output. The module runs as under `python -m`. Before that, a spare knows neither the keys nor the
data of a run. It ends with its supervisor, which closes the other end of the pair.

A spare imports at the lowest priority (SCHED_IDLE): only while its core is otherwise idle. With a nice value of 19 its
imports slowed a quickstart on two cores down by a tenth. An unprivileged process may not be able to raise its priority
again, but in Linux each thread has a priority of its own: a thread that ends afterwards imports, and the main thread,
which becomes the service, keeps its priority. Threads inherit the priority of the thread that starts them, so a spare
is not used if its imports leave threads behind.

Forks of one process that has imported everything would share its memory. Forking is unsafe here: the child of a process
with threads of torch, OpenMP or an engine has the locks that they held, but not the threads.
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
"""Fields of /proc/self/stat after the name: where the command line is in the memory of the process (proc(5))."""


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
    """Return the next message and its descriptor, or -1. End the process if the supervisor has closed its end."""
    message, descriptors, _, _ = socket.recv_fds(supervisor, MESSAGE_BYTES, 1)
    if not message:
        os._exit(0)  # at once: the imports may be under way
    return json.loads(message), descriptors[0] if descriptors else -1


def _import(names: Sequence[str], supervisor: socket.socket) -> None:
    """Import `names` at the lowest priority and tell the supervisor. On any failure end the process with status 1."""
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
        return  # the supervisor is gone, as the main thread notices
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
    """Have `ps` show `command`, as after a cold start. What exceeds the command line of the spare is cut off."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    text = b"\0".join(os.fsencode(each) for each in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
