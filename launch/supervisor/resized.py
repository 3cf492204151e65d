"""What the processes of a service need after its number of instances has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launch.supervisor.plan import Key


@dataclass(frozen=True)
class Resized:
    """The instances of a service, with the CPU threads of each, its CUDA_VISIBLE_DEVICES, and where it listens."""

    keys: list[Key]
    threads: int
    gpus: Mapping[Key, str]
    listen: str = ""
