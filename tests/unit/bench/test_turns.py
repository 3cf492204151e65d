"""Tests the order of benchmarks and summaries of several runs."""

from __future__ import annotations

import pytest

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
