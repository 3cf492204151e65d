"""What the kernel says when a mount or a directory takes no more bytes: producers and stores answer it with BUSY, never
with their end.
"""

import errno

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""A full mount; a directory whose quota is used up."""
