"""Reads token versions from a run's shards before the run ends, because the store stops when the run ends. Asserts
nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from proto import blockfile
from proto.tensors import Array
from tests.integration.whole_cluster import Cluster


class TokenVersions:
    """Token versions of a run. For every task ever put, `of[task_id, fence]` lists the versions of its sampled tokens,
    with one array per sequence."""

    def __init__(self, run: Cluster) -> None:
        self._run = run
        self._read: set[Path] = set()
        self.of: dict[tuple[str, int], list[Array]] = {}

    def read_to_the_end(self, steps: int) -> None:
        """Read until the run has written its last row, then wait for it to end successfully."""

        def ended() -> bool:
            self._read_new()
            return len(self._run.rows()) >= steps or self._run.process.poll() is not None

        self._run.wait_for(f"{steps} steps", ended)
        assert self._run.end() == 0, self._run.output()

    def by_step(self) -> dict[int, list[list[Array]]]:
        """Return, for every journaled step, the sequences of each of its tasks from the task's last put."""
        newest = dict(sorted(self.of))
        return {
            step: [self.of[task, newest[task]] for task in tasks if task in newest]
            for step, (_, tasks) in self._run.journaled_steps().items()
        }

    def _read_new(self) -> None:
        if not (self._run.path / "run.json").exists():
            return
        for file in set(self._run.run.shm.glob("*/*.blk")) - self._read:
            try:
                data = file.read_bytes()
                table = blockfile.parse(data, len(data))
            except (OSError, blockfile.WireError):
                continue  # The file has not been sealed yet, or it has been collected.
            self._read.add(file)
            for index, name in enumerate(zip(table.task_ids, table.fences, strict=True)):
                found = {
                    shard.key: np.frombuffer(data, np.int32, shard.nbytes // 4, shard.offset)
                    for shard in table.shards(index)
                    if shard.key in ("versions", "lengths")
                }
                if found:
                    sequences = np.split(found["versions"], np.cumsum(found["lengths"])[:-1])
                    self.of[name] = [each[each >= 0] for each in sequences]
