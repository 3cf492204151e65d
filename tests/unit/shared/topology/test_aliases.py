"""Anchors, aliases and merge keys in a topology, and the bounds on what a few lines of them may stand for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shared.topology import TopologyError, load
from shared.topology.document import MOST_CHARS, MOST_LEVELS, read
from tests.unit.shared.topology.small_topology import BASE, edited, problems, write

TEN = "[" + ", ".join(["*{0}"] * 10) + "]"


def bomb(levels: int, item: str = TEN, first: str = "[x, x]") -> str:
    """Return a value that stands for 10 ** `levels` times the `first` one."""
    lines = [f"  a0: &a0 {first}"] + [f"  a{at}: &a{at} {item.format(f'a{at - 1}')}" for at in range(1, levels + 1)]
    return "reward:\n  function: builtin:exact_match\n" + "\n".join(lines) + "\n"


def refused(folder: Path, reward: str) -> str:
    """Return the one line with which the topology is refused, within a few seconds."""
    path = edited(folder, 'reward: {function: "builtin:exact_match"}\n', reward)
    begun = time.process_time()
    (line,) = problems(path)
    assert time.process_time() - begun < 5
    assert len(line) < 400
    return line


def test_aliases_and_merged_mappings_have_the_values_that_they_stand_for(folder: Path) -> None:
    text = BASE.replace(
        '    held: {source: "builtin:addition?split=test", every: 5}\n',
        "    held: &held\n"
        '      source: "builtin:addition?split=test"\n'
        "      every: &five 5\n"
        "    again: {<<: *held, samples: *five, temperature: 0.5, every: 7}\n"
        "    third: {<<: [{samples: 2, temperature: 1.0}, *held], rows: 3}\n",
    )
    evals = load(write(folder, text)).data.eval
    assert (evals["again"].samples, evals["again"].every, evals["again"].source) == (5, 7, evals["held"].source)
    third = evals["third"]
    assert (third.samples, third.temperature, third.every, third.rows) == (2, 1.0, 5, 3)


def test_a_problem_in_a_merged_key_is_at_the_line_that_wrote_it(folder: Path) -> None:
    text = BASE.replace("every: 5}", "every: 0}\n    more: {<<: {source: 7}}")
    assert [line.partition(": ")[0] for line in problems(write(folder, text))] == ["t.yaml:8", "t.yaml:9"]


@pytest.mark.parametrize("value", ["7", "[7]", "[*held, 7]"])
def test_a_merge_of_something_else_than_mappings_is_refused(folder: Path, value: str) -> None:
    text = BASE.replace("held: {", "held: &held {") + f"placement: {{<<: {value}}}\n"
    assert any("<< needs an alias of another mapping" in line for line in problems(write(folder, text)))


@pytest.mark.parametrize(
    "reward",
    [
        bomb(9),
        bomb(9, first="x"),
        bomb(2, first="x" * 5000),
        bomb(9, item="{{<<: " + TEN + "}}", first="{b: 1}"),
        bomb(9, item="{{a: *{0}, b: *{0}, c: *{0}, d: *{0}}}"),
    ],
    ids=["lists", "texts", "long texts", "merges", "mappings"],
)
def test_aliases_that_stand_for_too_much_are_refused_in_one_line(folder: Path, reward: str) -> None:
    line = refused(folder, reward)
    assert f"the topology has more than {MOST_CHARS >> 10} Ki characters with every alias written out" in line
    assert line.startswith("t.yaml:")


def test_values_that_are_nested_too_deeply_are_refused_in_one_line(folder: Path) -> None:
    flat = "reward:\n  a0: &a0 [x]\n" + "".join(f"  a{at}: &a{at} [*a{at - 1}]\n" for at in range(1, 100))
    assert f"is within more than {MOST_LEVELS} mappings and lists" in refused(folder, flat)
    assert "too many mappings and lists within each other" in refused(folder, f"reward: {'[' * 1000}\n")
    (line,) = problems(write(folder), f"reward={'[' * 1000}")
    assert "too many mappings and lists within each other" in line


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TopologyError, match=f"more than {MOST_CHARS >> 10} Ki characters; is it a topology"):
        read(path)
