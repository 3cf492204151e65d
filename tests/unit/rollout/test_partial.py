"""Interrupted samples are resumed with the same first tokens, correct log-probs and versions, and without any token
that is too old."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proto.messages import BatchMeta, LeaseGrant, TaskHandle
from proto.tensors import Array
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.sampling import answers as sampling_answers
from services.rollout.sampling.answers import AnswerSampler, PartialJournal, ResumableNotes
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import BlockVersions, Completion
from shared.lease import Lease, LeaseLost
from shared.model.load import load_model
from shared.model.logprobs import token_logprobs
from shared.tensors_torch import to_numpy
from tests.unit.rollout.rollout_engine import MODEL, engine, sampling

NEW_TOKENS, SAMPLES, HOT = 60, 3, 8.0
PROMPTS = {"train/0/0": [3, 4, 5], "train/0/1": [6, 7, 8, 9, 10]}


@pytest.fixture(scope="module")
def tiny() -> Iterator[TransformersEngine]:
    made = engine(deterministic=False)
    yield made
    asyncio.run(made.stop())


class Rollout:
    """A sampler with its journal, and the leases that it samples."""

    def __init__(self, made: TransformersEngine, folder: Path, every_s: float = 0.0) -> None:
        self.engine = made
        self.journal = PartialJournal(folder, every_s)
        self.sampler = AnswerSampler(made, self.journal)

    def sample(
        self, *, version: int = 4, oldest: int = 0, lineage: int = 0, stop_after: int = 0, exact: bool = False
    ) -> dict[str, list[Completion]]:
        """Return the completions by task. If `stop_after` is not 0, the lease is lost after that number of decode
        steps."""
        handles = [TaskHandle(task_id, 1) for task_id in PROMPTS]
        grant = LeaseGrant(
            lease_id=1,
            stage="rollout",
            split="train",
            lease_s=30,
            batch=BatchMeta(tasks=handles),
            min_step=oldest,
            exact=exact,
            group_size=SAMPLES,
            block_rows=0,
        )
        lease = Lease(grant, lambda: 0)
        if stop_after:
            lease.cancel = _After(stop_after)
        ready = [ReadyTask(handle, {}, PROMPTS[handle.task_id]) for handle in handles]
        prepared = PreparedTasks(ready, [], sampling(SAMPLES, HOT, NEW_TOKENS), 2)
        versions = BlockVersions(version, self.engine.swaps, lineage)
        groups = asyncio.run(self.sampler.sample(lease, prepared, versions))
        return dict(zip(PROMPTS, groups, strict=True))

    def noted(self) -> dict[str, list[Completion]]:
        """Return the contents of the journal once everything has been written."""
        self.journal.close()
        wanted = ResumableNotes(SAMPLES, NEW_TOKENS, HOT, 0, 0, 100)
        return {task_id: self.journal.read(task_id, wanted) or [] for task_id in PROMPTS}


class _After(threading.Event):
    """An event that reads as set after `steps` calls to `is_set`."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def cut_off(tiny: TransformersEngine, folder: Path, steps: int = 25) -> dict[str, list[Completion]]:
    """Return the journal's notes for a lease that was lost after `steps` decode steps."""
    first = Rollout(tiny, folder)
    with pytest.raises(LeaseLost):
        first.sample(stop_after=steps)
    noted = first.noted()
    lengths = [len(each.token_ids) for group in noted.values() for each in group]
    assert max(lengths) == steps  # The last step is noted when the lease is lost.
    assert any(not each.finish_reason for group in noted.values() for each in group)
    return noted


def true_logprobs(prompt: list[int], answer: Completion) -> Array:
    model = load_model(MODEL, "float32")
    ids = np.concatenate([np.array(prompt, np.int32), answer.token_ids])
    mask = np.concatenate([np.zeros(len(prompt), np.uint8), np.ones(len(answer.token_ids), np.uint8)])
    scores, _ = token_logprobs(model, ids, np.array([len(ids)], np.int32), mask, HOT, 4096)
    return to_numpy(scores.detach())[len(prompt) :]


def test_an_interrupted_sample_continues_after_its_first_tokens(tiny: TransformersEngine, tmp_path: Path) -> None:
    noted = cut_off(tiny, tmp_path)
    answers = Rollout(tiny, tmp_path).sample(version=5)
    for task_id, group in answers.items():
        for before, answer in zip(noted[task_id], group, strict=True):
            known = len(before.token_ids)
            assert answer.token_ids[:known].tolist() == before.token_ids.tolist()
            assert set(answer.versions[:known]) <= {4}
            assert set(answer.versions[known:]) <= {5}
            assert bool(len(answer.versions[known:])) == (not before.finish_reason)
            assert answer.finish_reason == ("length" if len(answer.token_ids) == NEW_TOKENS else "stop")
            assert np.abs(true_logprobs(PROMPTS[task_id], answer) - answer.logprobs).max() < 1e-4


def test_a_sample_that_is_interrupted_twice_keeps_both_parts(tiny: TransformersEngine, tmp_path: Path) -> None:
    first = cut_off(tiny, tmp_path, steps=10)
    second = Rollout(tiny, tmp_path)
    with pytest.raises(LeaseLost):
        second.sample(version=5, stop_after=10)
    noted = second.noted()
    last = Rollout(tiny, tmp_path).sample(version=6)
    for task_id, group in last.items():
        for one, two, answer in zip(first[task_id], noted[task_id], group, strict=True):
            assert answer.token_ids[: len(one.token_ids)].tolist() == one.token_ids.tolist()
            assert answer.token_ids[: len(two.token_ids)].tolist() == two.token_ids.tolist()
    assert {4, 5, 6} == {int(version) for group in last.values() for each in group for version in each.versions}


@pytest.mark.parametrize(
    "lease",
    [{"oldest": 5}, {"lineage": 1}, {"exact": True}, {"version": 3}],
    ids=["too old", "rolled back", "exact", "later"],
)
def test_tokens_that_the_lease_may_not_use_are_sampled_again(
    tiny: TransformersEngine, tmp_path: Path, lease: dict[str, int]
) -> None:
    cut_off(tiny, tmp_path)
    version = lease.pop("version", 5)
    answers = Rollout(tiny, tmp_path).sample(version=version, **lease)  # type: ignore[arg-type]
    assert {int(each) for group in answers.values() for answer in group for each in answer.versions} == {version}


class StuckDisk:
    """A disk that blocks the journal's writer until `go_on` is set, and records the files written afterwards."""

    def __init__(self, journal: PartialJournal, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.written: list[str] = []
        rename = Path.rename

        def counted(source: Path, target: Path) -> Path:
            self.written.append(target.name)
            return rename(source, target)

        monkeypatch.setattr(Path, "rename", counted)
        journal._writer.submit(self.go_on.wait)


def numbered(number: int) -> list[Completion]:
    ids = np.full(number, number, np.int32)
    return [Completion(ids, np.zeros(number, np.float32), ids, "")] * SAMPLES


def test_only_the_newest_note_of_a_task_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = PartialJournal(tmp_path, 0.0)
    disk = StuckDisk(journal, monkeypatch)
    for number in range(1, 30):
        for task_id in ("train/0/0", "train/0/1", "train/0/2"):
            journal.note({task_id: numbered(number)}, 0, HOT)
    journal.forget(["train/0/2"])
    disk.go_on.set()
    journal.close()
    assert sorted(disk.written) == ["train-0-0.msgpack", "train-0-1.msgpack"]
    noted = journal.read("train/0/1", ResumableNotes(SAMPLES, NEW_TOKENS, HOT, 0, 0, 100))
    assert noted is not None
    assert [len(each.token_ids) for each in noted] == [29] * SAMPLES


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_answers, "CLOSE_S", 0.05)
    journal = PartialJournal(tmp_path, 0.0)
    disk = StuckDisk(journal, monkeypatch)
    journal.note({"train/0/0": numbered(1)}, 0, HOT)
    closing = threading.Thread(target=journal.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert not disk.written
    disk.go_on.set()


def test_a_stale_note_of_a_completed_task_is_deleted(tmp_path: Path) -> None:
    journal = PartialJournal(tmp_path, 0.0)
    for task_id in ("train/0/0", "train/0/1", "train/0/2"):
        journal.note({task_id: numbered(2)}, 0, HOT)
    journal.close()
    for name, age_s in (
        ("train-0-0", 2 * sampling_answers.STALE_S),
        ("train-0-1", sampling_answers.STALE_S / 2),
        ("train-0-2", 0.0),
    ):
        at = time.time() - 1e6 - age_s  # Notes do not age while the run is stopped.
        os.utime(tmp_path / f"{name}.msgpack", (at, at))
    PartialJournal(tmp_path, 0.0).close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train-0-1.msgpack", "train-0-2.msgpack"]


def test_a_completed_task_leaves_no_note_and_a_damaged_note_is_ignored(
    tiny: TransformersEngine, tmp_path: Path
) -> None:
    cut_off(tiny, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    files[0].write_bytes(files[0].read_bytes()[:40])
    rollout = Rollout(tiny, tmp_path, every_s=1000.0)
    answers = rollout.sample(version=5)
    versions = {task_id: {int(each) for a in group for each in a.versions} for task_id, group in answers.items()}
    assert versions == {"train/0/0": {5}, "train/0/1": {4, 5}}
    rollout.journal.forget(list(PROMPTS))
    rollout.journal.close()
    assert list(tmp_path.iterdir()) == []
