"""A put that cannot be written ends before its descriptor and its mapping are reused."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from proto.blockfile import BlockLayout
from shared.dataplane import write


def test_a_write_waits_for_its_other_half_when_one_half_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout([(f"t/0/{i}", 1, {"a": np.zeros(1 << 20, np.uint8)}) for i in range(16)])
    begun, ended = threading.Event(), threading.Event()
    mine = threading.get_ident()

    def rows(descriptor: int, layout: BlockLayout, begin: int, end: int) -> list[int]:
        if threading.get_ident() == mine:
            assert begun.wait(30)
            raise OSError(28, "No space left on device")
        begun.set()
        ended.wait(0.5)  # This half is still writing when the other one fails.
        ended.set()
        return [0] * (end - begin)

    monkeypatch.setattr(write, "_write_rows", rows)
    with ThreadPoolExecutor(1) as helper, open(os.devnull, "wb") as file:
        with pytest.raises(OSError, match="No space left"):
            write.write_block(file.fileno(), layout, helper)
        assert ended.is_set()
