"""Tests that the comparison of the data plane with its peers shows the goal beside the ratio that it applies to."""

from __future__ import annotations

from rich.console import Console

from tests.bench.against_data_peers import OURS, SWEPT, WIDTH, comparison
from tests.bench.data_work import Rows


def test_the_goal_stands_beside_the_ratio_to_transfer_queue() -> None:
    def rounds(seconds: float) -> Rows:
        return [{"put_s": seconds, "get_read_s": seconds}] * 3

    results = {OURS: [rounds(1.0)], **{system: [rounds(4.0)] for system in SWEPT}}
    console = Console(width=WIDTH, record=True)
    console.print(comparison(results, 1, 3))
    lines = console.export_text().splitlines()
    [row] = [line for line in lines if "put + get + read" in line]
    assert row.split("│")[-2].strip() == "10 over transfer-queue"
    assert row.count("4.00") == len(SWEPT)
