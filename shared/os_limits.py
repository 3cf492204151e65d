"""Operating-system limits: the errors raised when disks or descriptors are exhausted, and the limit on open
descriptors.

libzmq aborts a process that has no descriptor left when a peer connects over ipc. Each connection from another host
takes two descriptors, and a batch can map thousands of files, each of which takes one.
"""

from __future__ import annotations

import errno
import resource

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
