"""Tests how weighted sources take turns, and that the turns are re-created fast."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.plan import EpochOrder, SourcePlan
from services.scheduler.turns import BLOCK, SourceTurns, Weights
from tests.unit.scheduler.bench import plan

POSITIONS = BLOCK + 3000


def constant(*weights: float) -> list[Weights]:
    return [((0, weight),) for weight in weights]


def targets(weights: list[Weights], positions: int) -> npt.NDArray[np.float64]:
    """Return, for each source, the sum of its shares after each position, float64 [sources, positions]."""
    shares = np.zeros((len(weights), positions))
    for source, own in enumerate(weights):
        for first, weight in own:
            shares[source, first:] = weight
    return np.asarray(np.cumsum(shares / shares.sum(axis=0), axis=1))


def largest_error(weights: list[Weights], positions: int) -> float:
    sources, tasks = SourceTurns(weights).some(0, positions)
    expected, errors = targets(weights, positions), []
    for source in range(len(weights)):
        turns = np.cumsum(sources == source)
        assert tasks[sources == source].tolist() == list(range(turns[-1]))
        errors.append(float(np.abs(turns - expected[source]).max()))
    return max(errors)


@pytest.mark.parametrize(
    "weights",
    [
        constant(0.5, 0.3, 0.2),
        constant(1.0, 1.0),
        constant(*[1.0] * 12),
        constant(0.49, 0.49, 0.01, 0.01),
        constant(1e-4, 3.0, 0.7, 0.0),
        [((0, 1.0), (100, 0.25), (70_000, 1.0)), ((0, 0.0), (500, 1.0)), ((0, 0.1), (66_000, 0.0))],
    ],
)
def test_after_any_number_of_tasks_every_source_has_had_its_share_give_or_take_one(weights: list[Weights]) -> None:
    assert largest_error(weights, 2 * BLOCK) < 1.0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.001, 1.0), st.integers(1, 3000), st.sampled_from([0.0, 0.01, 0.5, 1.0])),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, POSITIONS - 200),
    st.integers(0, 200),
)
def test_turns_follow_weights_that_change_and_do_not_depend_on_what_was_asked_before(
    drawn: list[tuple[float, int, float]], position: int, count: int
) -> None:
    weights: list[Weights] = [((0, first), (change, then)) for first, change, then in drawn]
    weights[0] = (weights[0][0],)  # The sum of the weights is never 0.
    assert largest_error(weights, 4000) < 1.0
    turns = SourceTurns(weights)
    later = turns.some(position, count)
    every = turns.some(0, position + count)
    for some, all_of_them in zip(later, every, strict=True):
        assert some.tolist() == all_of_them[position:].tolist()


def two_sources(seed: int = 1) -> EpochOrder:
    sources = (SourcePlan([0, 2, 3, 5], ((0, 3.0),)), SourcePlan([10, 11, 13], ((0, 1.0),)))
    return EpochOrder(plan(rows=[0, 2, 3, 5, 10, 11, 13], sources=sources, shuffle=True, seed=seed))


def test_each_source_has_epochs_of_its_own() -> None:
    places = two_sources().some(0, 64)
    for rows, tasks in (([0, 2, 3, 5], 48), ([10, 11, 13], 16)):
        own = [place for place in places if place[1] in rows]
        assert len(own) == tasks
        assert [epoch for epoch, _ in own] == [number // len(rows) for number in range(tasks)]
        for first in range(0, tasks - len(rows) + 1, len(rows)):
            assert sorted(row for _, row in own[first : first + len(rows)]) == rows
    assert len(set(places)) == len(places)  # A task id occurs once.
    assert places == [two_sources().at(position) for position in range(64)]
    assert places != two_sources(seed=2).some(0, 64)


def test_a_source_without_weights_has_the_order_that_it_has_alone() -> None:
    rows = [0, 2, 3, 5]
    alone = EpochOrder(plan(rows=rows, shuffle=True)).some(0, 20)
    assert EpochOrder(plan(rows=rows, sources=(SourcePlan(rows),), shuffle=True)).some(0, 20) == alone


def test_a_million_positions_are_re_created_in_less_than_a_second_of_cpu_time() -> None:
    sources = (
        SourcePlan(range(7844), ((0, 0.5), (300_000, 0.2))),
        SourcePlan(range(7844, 20_000), ((0, 0.3),)),
        SourcePlan(range(20_000, 21_000), ((0, 0.2),)),
    )
    begin = time.process_time()
    places = EpochOrder(plan(rows=range(21_000), sources=sources, shuffle=True)).some(0, 1_000_000)
    spent_s = time.process_time() - begin
    print(f"{spent_s:.2f} s")
    assert len(set(places)) == 1_000_000
    assert spent_s < 1.0


def test_plans_with_other_weights_have_other_fingerprints() -> None:
    rows = [0, 2, 3, 5]
    made = {
        plan(rows=rows, sources=sources).fingerprint()
        for sources in (
            (),
            (SourcePlan([0, 2]), SourcePlan([3, 5])),
            (SourcePlan([0, 2]), SourcePlan([3, 5], ((0, 2.0),))),
            (SourcePlan([0]), SourcePlan([2, 3, 5])),
        )
    }
    assert len(made) == 4
