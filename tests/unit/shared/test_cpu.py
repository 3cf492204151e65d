"""A computing process keeps freed memory until the process is told to return it, whichever thread freed it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MIB = 1 << 20
CODE = """
import sys, threading
import psutil, torch
from shared.model import cpu

def measure():
    torch.ones(1 << 10)
    figures, begin = [], psutil.Process().memory_info().rss
    def note():
        figures.append((psutil.Process().memory_info().rss - begin) >> 20)
    tensor = torch.ones(20 << 18)
    note()
    del tensor
    note()
    cpu.give_back()
    note()
    print(*figures)

cpu.set_up(1)
if sys.argv[1] == "thread":
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
else:
    measure()
"""


def mib_held_kept_and_left(where: str, **environment: str) -> list[int]:
    """Return the resident MiB of a 20 MiB tensor: while it exists, after it is freed, and after memory is returned."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ended = subprocess.run(
        [sys.executable, "-c", CODE, where],
        env={**inherited, "MALLOC_ARENA_MAX": "2", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in ended.stdout.split()]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_freed_memory_is_kept_until_it_is_returned(where: str) -> None:
    held, kept, left = mib_held_kept_and_left(where)
    assert held >= 19
    assert kept >= 19
    assert left <= 4


def test_allocator_settings_in_the_environment_are_respected() -> None:
    held, kept, _ = mib_held_kept_and_left("main", MALLOC_MMAP_THRESHOLD_=str(MIB))
    assert held >= 19
    assert kept <= 4
