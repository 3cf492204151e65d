"""Errors of a full mount or directory. Producers and stores answer them with BUSY and keep running."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
"""A full mount, and an exhausted quota."""
