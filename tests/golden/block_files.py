"""Defines the golden block files (proto/SPEC.md section 9)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from proto import blockfile, tensors
from proto.tensors import Array
from tests.golden.values import plain, tensor

Tasks = list[tuple[str, int, dict[str, Array]]]


@dataclass(frozen=True)
class BlockFile:
    """The tasks in a file, each as (task id, fence, shards by key)."""

    name: str
    purpose: str
    tasks: Tasks

    def data(self) -> bytes:
        """Return the bytes of the file."""
        layout = blockfile.BlockLayout(self.tasks)
        file = bytearray(layout.file_bytes)
        head = layout.head([tensors.checksum(array) for array in layout.arrays])
        file[: len(head)] = head
        for offset, array in zip(layout.offsets, layout.arrays, strict=True):
            file[offset : offset + array.nbytes] = array.tobytes()
        return bytes(file)


def _samples(lengths: list[int], first: int) -> dict[str, Array]:
    tokens = sum(lengths)
    return {
        "token_ids": np.arange(first, first + tokens, dtype=np.int32),
        "lengths": np.array(lengths, np.int32),
        "loss_mask": np.array([place > 0 for each in lengths for place in range(each)], np.uint8),
        "rollout_logprobs": -np.arange(tokens, dtype=np.float32) / 4,
    }


def block_files() -> list[BlockFile]:
    """Return all golden block files, in the order of the index."""
    longer = _samples([3, 0, 2], first=10)
    return [
        BlockFile(
            "block_two_tasks",
            "ragged samples of two tasks with different keys; one shard is empty and two-dimensional",
            [
                ("train/0/7", 3, _samples([4], first=1)),
                ("train/0/8", 2**62, longer | {"extra:1": np.zeros((0, 3), np.float64), "scale": np.array(0.5)}),
            ],
        ),
        BlockFile(
            "block_one_shard", "one task with one shard", [("train/0/7", 1, {"x": np.arange(2, dtype=np.uint8)})]
        ),
        BlockFile(
            "block_recorded",
            "what the trainer puts for the recorder, for a task of two samples with five tokens in all",
            [
                (
                    "train/0/7",
                    3,
                    {
                        "sample_advantages": np.array([0.5, -0.5], np.float32),
                        "train_logprobs": np.array([0.0, -0.25, 0.0, -1.5, -0.75], np.float32),
                    },
                )
            ],
        ),
    ]


def hash_of(checksums: list[int]) -> int:
    """Return the content hash of a task whose shards have these checksums (section 8)."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(checksums)}Q", *checksums))


def entry(block: BlockFile, data: bytes) -> dict[str, Any]:
    """Return the entry for one file in files.json."""
    table = blockfile.parse(data, len(data))
    tasks = []
    for index, (task_id, fence, shards) in enumerate(block.tasks):
        content_hash = hash_of([shard.checksum for shard in table.shards(index)])
        rows = [
            {
                "key": shard.key,
                **tensor(shards[shard.key]),
                "offset": shard.offset,
                "nbytes": shard.nbytes,
                "checksum": shard.checksum,
            }
            for shard in table.shards(index)
        ]
        tasks.append({"task_id": task_id, "fence": fence, "content_hash": content_hash, "shards": rows})
    values = {
        "name": block.name,
        "purpose": block.purpose,
        "file": f"{block.name}.blk",
        "file_bytes": len(data),
        "head_bytes": blockfile.HEADER_BYTES + blockfile.table_bytes(data[: blockfile.HEADER_BYTES], len(data)),
        "tasks": tasks,
    }
    return dict(plain(values))
