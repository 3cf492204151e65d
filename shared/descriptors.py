"""Raises the soft limit on open descriptors. libzmq ends the process that has none left when somebody connects over
ipc, every connection of another host has two, and a batch may map thousands of files, each with one.
"""

from __future__ import annotations

import errno
import resource

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""None is left for this process, or on this machine: later there may be."""


def raise_descriptor_limit() -> int:
    """Set the soft limit to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
