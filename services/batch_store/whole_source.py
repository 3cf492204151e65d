"""Provides bytes that a store serves unchanged: the home host's files that other hosts fetch, and the list of these
files."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import msgspec

from proto.ids import split_task_id
from proto.messages import ErrorCode, PutTask
from shared.rpc.errors import RpcError
from shared.topology import Topology, distribution, document


class WholeSource:
    """The content of a stream without a head: a single block of bytes."""

    covered = 1
    head_bytes = head_checksum = 0

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.total_bytes = self.available_bytes = len(data)

    def pieces(self, at: int, nbytes: int) -> list[memoryview]:
        """Return the bytes `at` to `at + nbytes`."""
        return [self._data[at : at + nbytes]]


class DistributedFiles:
    """The topology's files that hosts fetch from the home host, as `files/0/<index>`. Index 0 is the list of these
    files."""

    def __init__(self, name: str, file: Path, topology: Topology) -> None:
        """`name` is the name of the store, for error messages; `file` holds the resolved topology."""
        self._name = name
        self._file = file
        self._is_distributed = topology.policy.distribute
        self._lock = threading.Lock()
        self._paths: list[Path] = []
        self._list = b""

    def open(self, task: PutTask) -> tuple[str, WholeSource]:
        """Return a name for the content, and the content. Blocks, so call it on a worker thread.

        Raises RpcError(missing).
        """
        try:
            index = split_task_id(task.task_id)[2]
            if not self._is_distributed:
                raise IndexError("policy.distribute is false")
            with self._lock:
                if not self._list:
                    distributed = distribution.files(document.plain(self._file.read_text(encoding="utf-8")))
                    self._paths = [path for _, path in distributed]
                    self._list = msgspec.json.encode([file for file, _ in distributed])
            if index == 0:
                return "list", WholeSource(memoryview(self._list))
            path = self._paths[index - 1]
            with path.open("rb") as file:
                return str(path), WholeSource(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except (OSError, IndexError, ValueError) as error:  # ValueError: an empty file
            raise RpcError(ErrorCode.MISSING, f"{self._name}: {task.task_id}: {error}", names=[task.task_id]) from None
