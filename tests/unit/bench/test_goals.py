"""Tests that the comparisons with peers show the goal beside the ratio that it applies to."""

from __future__ import annotations

from tests.bench.against_data_peers import OURS, PEERS, comparison
from tests.bench.against_trl import QUICKSTART, Side, table
from tests.bench.data_work import Rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_goal_stands_beside_the_ratio_to_transfer_queue() -> None:
    def rounds(seconds: float) -> Rows:
        return [{"put_s": seconds, "get_read_s": seconds}] * 3

    header, _, *lines = comparison({OURS: [rounds(1.0)], **{system: [rounds(4.0)] for system in PEERS}})
    assert cells(header)[-2:] == ["relative to Ray", "relative to TransferQueue"]
    assert [cells(line)[-2:] for line in lines] == [["4.00", "4.00"]] * 3 + [["4.00", "4.00 (goal: 10)"]]


def test_the_table_of_ratios_to_trl_has_a_row_with_the_goal_for_each_staleness() -> None:
    def runs(*rates: float) -> list[Side]:
        return [Side(each, 0.5, 3.7, 1.0, 0.0) for each in rates]

    _, _, *lines = table(QUICKSTART, {1: (runs(400, 500), runs(100, 100)), 0: (runs(300, 300), runs(100, 100))})
    assert [cells(line)[:3] + cells(line)[-2:] for line in lines] == [
        ["quickstart", "3.7", "1", "4.50 [4.00, 5.00]", "5.5"],
        ["quickstart", "3.7", "0", "3.00 [3.00, 3.00]", "3.5"],
    ]
