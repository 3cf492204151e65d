"""Tests the division of a batch among data-parallel ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.messages import BatchMeta, TaskHandle
from services.policy_trainer.dispatch import imbalance
from shared.batch import Batch
from shared.ranks.layout import Layout

SIZES = st.lists(st.integers(0, 5000), max_size=60)


def batch(sizes: list[int], samples: int = 4) -> Batch:
    tasks = [TaskHandle(f"train/0/{i}", 1, samples + i % 2, size, 0, [0]) for i, size in enumerate(sizes)]
    weights = np.linspace(0.1, 0.9, sum(task.samples for task in tasks), dtype=np.float32)
    return Batch(BatchMeta(tasks=tasks, scalars={"weights": weights}))


def chunks_of(sizes: list[int], parts: int) -> list[list[int]]:
    """Return the task indices of each part."""
    return [[int(name.rsplit("/", 1)[1]) for name in each.task_ids] for each in batch(sizes).chunk(parts)]


@given(SIZES, st.integers(1, 9))
def test_every_task_is_assigned_once_in_order_and_no_rank_exceeds_grahams_bound(sizes: list[int], parts: int) -> None:
    chosen = chunks_of(sizes, parts)
    assert sorted(index for part in chosen for index in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in chosen)
    loads = [sum(sizes[index] for index in part) for part in chosen]
    fullest = max(loads)
    assert fullest - min(loads) <= max(sizes, default=0)
    # When the fullest rank got its last task, no rank had fewer tokens. The last task is at most as large as the
    # largest task.
    assert fullest * parts <= sum(sizes) + (parts - 1) * max(sizes, default=0)


def test_ties_go_to_the_lower_task_and_the_lower_rank() -> None:
    assert chunks_of([12, 6, 5, 5, 2, 2, 2, 1], 3) == [[0], [1, 4, 5, 6], [2, 3, 7]]
    assert chunks_of([0] * 8, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@given(SIZES, st.integers(1, 5))
def test_samples_stay_with_their_tasks(sizes: list[int], parts: int) -> None:
    whole = batch(sizes)
    first = np.cumsum([0] + [task.samples for task in whole.tasks])
    for each in whole.chunk(parts):
        wanted = [place for task in each.tasks for place in _places(whole, task, first)]
        # The weights are unchanged, because they were computed over the whole batch.
        assert each.scalars["weights"].tolist() == whole.scalars["weights"][wanted].tolist()
        assert each.tokens == sum(task.tokens for task in each.tasks)


def _places(whole: Batch, task: TaskHandle, first: np.ndarray) -> list[int]:
    index = whole.tasks.index(task)
    return list(range(first[index], first[index + 1]))


def test_imbalance_is_the_load_of_the_fullest_rank_divided_by_the_mean() -> None:
    assert imbalance(batch([30, 10]).chunk(2)) == 1.5
    assert imbalance(batch([]).chunk(3)) == 1.0


def test_slicing_ten_times_the_samples_takes_less_than_thirty_times_as_long() -> None:
    assert sliced(10_000) < 30 * sliced(1_000)


def sliced(samples: int) -> float:
    """Slice so many samples for eight ranks. Return the CPU seconds of the fastest of five times."""
    whole = batch(np.random.default_rng(0).integers(100, 8000, size=samples).tolist(), samples=1)
    spent: list[float] = []
    for _ in range(5):
        began = time.process_time()
        chunks = whole.chunk(8)
        spent.append(time.process_time() - began)
    assert imbalance(chunks) < 1.001
    return min(spent)


@pytest.mark.parametrize(("tp", "pp", "cp", "dp"), [(2, 2, 1, 2), (1, 1, 2, 3), (2, 1, 2, 1)])
def test_every_place_of_a_layout_is_used_once_and_each_data_rank_has_one_leader(
    tp: int, pp: int, cp: int, dp: int
) -> None:
    layout = Layout(tp * pp * cp * dp, tp, pp, cp)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert layout.dp == dp
    assert len({(each.tp_rank, each.pp_rank, each.cp_rank, each.dp_rank) for each in places}) == layout.world_size
    assert sorted(each.dp_rank for each in places if each.leads) == list(range(dp))
    assert sum(each.counts for each in places) == dp * cp


def test_degrees_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"6 ranks are not a multiple of tp\*pp\*cp = 4"):
        Layout(6, 2, 1, 2)
