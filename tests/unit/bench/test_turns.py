"""Tests the order of benchmarks, summaries of several runs, and the choice among recorded settings of a peer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.bench import against_trl
from tests.bench.against_trl import QUICKSTART, Settings, Side, fastest, grid, on_time, sweep
from tests.bench.cluster_run import BenchError
from tests.bench.turns import by_turns, ratios, spread


def test_every_second_turn_runs_in_reverse_order() -> None:
    called: list[str] = []

    def side(name: str) -> str:
        called.append(name)
        return f"{name}{len(called)}"

    results = by_turns({name: lambda name=name: side(name) for name in "abc"}, 3)
    assert "".join(called) == "abccbaabc"
    assert results == {"a": ["a1", "a6", "a7"], "b": ["b2", "b5", "b8"], "c": ["c3", "c4", "c9"]}


def test_a_figure_shows_the_median_and_the_range_and_ratios_compare_values_from_the_same_turn() -> None:
    assert spread([30, 10, 20]).text(".0f") == "20 [10, 30]"
    assert spread([1.5]).text(".1f") == "1.5"
    assert ratios([10, 20, 40], [10, 10, 10]).values == (1, 2, 4)
    with pytest.raises(ValueError, match="shorter"):
        ratios([1, 2], [1])


def rate_of(settings: Settings) -> float:
    """Return a rate that is higher with two micro-batches per step, and higher still with two steps per generation."""
    return 100.0 + 50 * (settings.micro_batch == 256) + 30 * (settings.generation_batch == 1024)


def test_a_sweep_tries_every_setting_and_uses_the_fastest_for_each_staleness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = list(grid(QUICKSTART, cores=2))
    assert {each.threads for each in settings} == {1, 2}
    assert {(each.micro_batch, each.generation_batch) for each in settings} == {
        (micro, generated) for micro in (512, 256, 128) for generated in (256, 512, 1024) if generated % micro == 0
    }
    record = sweep(QUICKSTART, settings, lambda each: Side(rate_of(each), 0, 0, 0, 0), lambda *_: None)
    assert {len(each["samples_per_s"]) for each in record["settings"]} == {1, 3}
    assert fastest(QUICKSTART, record, 1).generation_batch == 1024
    on_policy = fastest(QUICKSTART, record, 0)
    assert (on_policy.micro_batch, on_time(QUICKSTART, on_policy, 0)) == (256, True)
    monkeypatch.setattr(against_trl, "RECORD", against_trl.ROOT / "tests" / "no_such_record.json")
    with pytest.raises(BenchError, match="no sweep of 'quickstart': run this command with --sweep"):
        against_trl.record_of(dataclasses.replace(QUICKSTART))
