"""Operating-system limits: the errors raised when disks or descriptors are exhausted, the limit on open descriptors,
and the size of the memory.

libzmq aborts a process that has no descriptor left when a peer connects over ipc. Each connection from another host
takes two descriptors, and a batch can map thousands of files, each of which takes one.
"""

from __future__ import annotations

import contextlib
import errno
import resource
from pathlib import Path

import psutil

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Errors raised on a full mount or an exhausted quota. Producers and stores answer them with BUSY and keep running."""
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""Errors raised when the process or the machine has no descriptor left. A later attempt may succeed."""


def raise_descriptor_limit() -> int:
    """Set the soft limit to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def host_bytes() -> int:
    """Return the memory of this machine, or of its topmost control group (a container) if that is less."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
