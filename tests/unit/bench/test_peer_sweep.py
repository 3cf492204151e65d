"""Tests the search for a peer's fastest settings, and the choice among recorded ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import log2
from pathlib import Path

import pytest

from tests.bench.against_trl import QUICKSTART, Settings, axes, on_time, sweep
from tests.bench.cluster_run import BenchError
from tests.bench.peer_sweep import REPEATS, PeerRun, fastest, recorded_best, save, search, unmeasured

AXES = {"threads": (1, 6), "units": (1, 64)}


@dataclass(frozen=True)
class Two:
    """Two settings."""

    threads: int
    units: int


def test_a_sweep_leaves_its_grid_until_no_neighbour_is_faster() -> None:
    def measure(each: Two) -> float:
        return 100 / (1 + abs(log2(each.units) - 4)) + each.threads

    measured = search([Two(1, 1), Two(1, 2)], AXES, measure)
    assert fastest(measured) == Two(6, 16)  # the limit of one axis, and an optimum outside the first grid of the other
    assert {Two(6, 8), Two(6, 32), Two(3, 16)} <= measured.keys()
    assert unmeasured(measured, AXES, lambda _: True) == []


def test_settings_close_to_the_fastest_are_repeated_so_that_one_lucky_run_does_not_win() -> None:
    lucky = iter([130.0, 80.0, 80.0])

    def measure(each: Two) -> float:
        if each == Two(1, 4):
            return next(lucky)
        return {2: 100.0, 1: 99.0, 8: 50.0}.get(each.units, 0.0) if each.threads == 1 else 0.0

    measured = search([Two(1, 1), Two(1, 4)], AXES, measure)
    assert fastest(measured) == Two(1, 2)
    assert {each: len(runs) for each, runs in measured.items() if len(runs) > 1} == {
        each: REPEATS for each in (Two(1, 1), Two(1, 2), Two(1, 4))
    }


def test_trl_is_swept_for_each_staleness_within_the_limits_of_a_step() -> None:
    def rate_of(each: Settings) -> float:
        return 100.0 - abs(each.micro_batch - 64) + 30 * (each.generation_batch == 1024)

    measured = sweep(QUICKSTART, 2, rate_of)
    assert {each.generation_batch % each.micro_batch for each in measured} == {0}
    assert max(each.generation_batch for each in measured) == 1024
    allowed = {at: partial(on_time, QUICKSTART, staleness=at) for at in (1, 0)}
    best = {at: fastest(measured, allowed[at]) for at in (1, 0)}
    assert (best[1].micro_batch, best[1].generation_batch) == (64, 1024)
    assert best[0].micro_batch == 64
    assert best[0].generation_batch <= 512
    for at in (1, 0):
        assert unmeasured(measured, axes(QUICKSTART, 2), allowed[at]) == []


def test_a_record_whose_optimum_lies_at_the_edge_of_what_was_tried_is_refused(tmp_path: Path) -> None:
    def run(rate: float) -> list[PeerRun]:
        return [PeerRun(rate, 0.1)] * REPEATS

    record = tmp_path / "sweep.json"
    inside = {Two(1, 2): run(10), Two(2, 2): run(9), Two(1, 4): run(8), Two(1, 1): run(7)}
    save(record, "inside", inside, "a 1.0", unit="GB/s")
    save(record, "edge", {Two(1, 2): run(10), Two(2, 2): run(9), Two(1, 1): run(7)}, "a 1.0", unit="GB/s")
    best, line = recorded_best(record, "inside", Two, AXES)
    assert best == Two(1, 2)
    assert line.startswith("threads 1, units 2: fastest of 4 in ")
    with pytest.raises(BenchError, match="did not try threads 1, units 4: run this command with --sweep"):
        recorded_best(record, "edge", Two, AXES)
    with pytest.raises(BenchError, match="has no sweep of 'other': run this command with --sweep"):
        recorded_best(record, "other", Two, AXES)
