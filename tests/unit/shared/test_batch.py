"""Splitting and joining batches keeps every task exactly once, and only `fetch` moves data."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from proto.messages import BatchMeta, BatchPart, TaskHandle
from proto.tensors import Array
from shared.batch import Batch, BatchStatus
from shared.rpc.errors import RpcError


def meta(
    tokens: Sequence[int], keys: Sequence[str] = ("a", "b"), store: str = "batch-store/0", first: int = 0
) -> BatchMeta:
    tasks = [
        TaskHandle(f"train/0/{first + i}", 1, samples=2, tokens=n, nbytes=10, stores=[0]) for i, n in enumerate(tokens)
    ]
    return BatchMeta(tasks=tasks, parts=[BatchPart("stage", list(keys))], stores=[store])


def local(tokens: Sequence[int], keys: Sequence[str] = ("a", "b"), first: int = 0) -> Batch:
    data: tuple[dict[str, Array], ...] = tuple({key: np.full(n, ord(key)) for key in keys} for n in tokens)
    return Batch(meta(tokens, keys, first=first), None, data)


def test_status_tells_whether_the_data_is_local_or_remote() -> None:
    assert Batch(meta([1])).status is BatchStatus.REMOTE
    assert local([1]).status is BatchStatus.LOCAL
    assert Batch(meta([])).status is BatchStatus.EMPTY


def test_access_to_an_item_in_a_remote_batch_is_refused_until_the_batch_is_fetched() -> None:
    with pytest.raises(RuntimeError, match=r"REMOTE.*await batch.fetch"):
        Batch(meta([1]))["a"]


def test_item_in_a_local_batch_has_one_array_per_task() -> None:
    assert [array.tolist() for array in local([1, 2])["b"]] == [[98], [98, 98]]
    with pytest.raises(KeyError, match="holds a, b"):
        local([1])["c"]


def test_repr_shows_status_size_and_keys() -> None:
    assert repr(Batch(meta([3, 4]))) == "Batch(REMOTE, 2 tasks, 4 samples, 7 tokens, keys=[a, b])"
    assert repr(local([3], "a")) == "Batch(LOCAL, 1 tasks, 2 samples, 3 tokens, keys=[a])"


def test_fetch_without_a_client_is_refused() -> None:
    with pytest.raises(RpcError, match="cannot fetch a"):
        asyncio.run(Batch(meta([1])).fetch(["a"]))


def test_duplicate_task_is_refused() -> None:
    one = meta([1])
    with pytest.raises(ValueError, match="occurs twice"):
        Batch(BatchMeta(tasks=[*one.tasks, *one.tasks], parts=one.parts, stores=one.stores))


def test_chunk_returns_empty_batches_when_tasks_run_out() -> None:
    chunks = Batch(meta([5, 3])).chunk(3)
    assert [chunk.status.name for chunk in chunks] == ["REMOTE", "REMOTE", "EMPTY"]
    assert chunks[2]["a"] == []
    with pytest.raises(ValueError, match="at least 1"):
        Batch(meta([5])).chunk(0)


def test_parts_of_a_local_batch_are_handles() -> None:
    with pytest.raises(RuntimeError, match="REMOTE"):
        local([5, 3]).take([0])["a"]


def test_scalars_have_one_value_per_sample() -> None:
    whole = Batch(meta([5, 3])).with_scalars({"x": np.arange(4)})
    assert whole.take([1, 0]).scalars["x"].tolist() == [2, 3, 0, 1]
    assert [part.scalars["x"].tolist() for part in whole.split(1)] == [[0, 1], [2, 3]]
    assert whole.groups.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"4 samples: scalars y \[3\]"):
        whole.with_scalars({"y": np.arange(3)})


def test_concat_of_chunks_has_the_same_tasks() -> None:
    whole = Batch(meta([5, 3, 9, 1]))
    joined = Batch.concat(whole.chunk(3))
    assert sorted(joined.task_ids) == sorted(whole.task_ids)
    assert joined.tokens == whole.tokens


def test_concat_renumbers_stores_and_reorders_parts() -> None:
    one = BatchMeta(
        tasks=[TaskHandle("t/0/0", 1, stores=[0, 1])],
        parts=[BatchPart("x", ["a"]), BatchPart("y", ["b"])],
        stores=["batch-store/0", "batch-store/1"],
    )
    two = BatchMeta(
        tasks=[TaskHandle("t/0/1", 1, stores=[0, 1])],
        parts=[BatchPart("y", ["b"]), BatchPart("x", ["a"])],
        stores=["batch-store/1", "batch-store/2"],
    )
    joined = Batch.concat([Batch(one), Batch(two)]).meta
    places = [[joined.stores[number] for number in task.stores] for task in joined.tasks]
    assert places == [["batch-store/0", "batch-store/1"], ["batch-store/2", "batch-store/1"]]


def test_concat_refuses_differing_keys_and_duplicate_tasks() -> None:
    with pytest.raises(ValueError, match="differ"):
        Batch.concat([Batch(meta([1], ["a"])), Batch(meta([1], ["b"], first=5))])
    with pytest.raises(ValueError, match="occurs twice"):
        Batch.concat([Batch(meta([1])), Batch(meta([1]))])


def test_union_adds_keys_in_the_task_order_of_the_first_batch() -> None:
    one = Batch(meta([1, 2, 3], ["a"]))
    two = Batch(meta([1, 2, 3], ["b"], store="batch-store/7")).take([2, 0, 1])
    both = one.union(two)
    assert both.task_ids == one.task_ids
    assert both.keys == ("a", "b")
    assert [[both.meta.stores[s] for s in task.stores] for task in both.meta.tasks] == [
        ["batch-store/0", "batch-store/7"]
    ] * 3
    assert one.keys == ("a",)


def test_union_of_equal_parts_is_the_same_batch() -> None:
    one = Batch(meta([1, 2]))
    assert one.union(Batch(meta([1, 2]))).meta == one.meta


def test_union_refuses_partly_overlapping_keys_different_tasks_and_different_fences() -> None:
    one = Batch(meta([1, 2], ["a", "b"]))
    with pytest.raises(ValueError, match="b on both sides"):
        one.union(Batch(meta([1, 2], ["b", "c"])))
    with pytest.raises(ValueError, match="must be the same"):
        one.union(Batch(meta([1, 2], ["c"], first=1)))
    other = meta([1, 2], ["c"])
    fenced = BatchMeta(
        tasks=[TaskHandle(t.task_id, 9, stores=[0]) for t in other.tasks], parts=other.parts, stores=other.stores
    )
    with pytest.raises(ValueError, match="fences"):
        one.union(Batch(fenced))
