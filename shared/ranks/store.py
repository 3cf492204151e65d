"""Opens the key-value store through which the ranks of a process group find each other."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from shared.ranks.meeting import Meeting


def open_store(meeting: Meeting, ranks: int, limit: timedelta) -> Store:
    """Return the store for `ranks` ranks. A wait that takes longer than `limit` raises RuntimeError."""
    if meeting.file is not None:
        store = FileStore(str(meeting.file), ranks)
        store.set_timeout(limit)
        return store
    host, _, port = meeting.store.rpartition(":")
    listener = meeting.listener.detach() if meeting.listener is not None else None
    return TCPStore(
        host,
        int(port),
        ranks,
        listener is not None,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
