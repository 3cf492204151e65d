"""Errors of a full mount or directory. Producers and stores answer them with BUSY and keep running."""

import errno

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full mount and of an exhausted quota."""
