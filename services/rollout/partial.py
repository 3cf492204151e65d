"""Notes of samples that are not finished yet, for whoever samples their task next. Must never make a block wait: a note
that is lost costs tokens, nothing else.

One file a task in the run directory, written in one move: a kill leaves the note before or the new one. Engines on one
host share them. Nothing of an exact version (evaluations, deterministic mode) is ever noted. Of a task the newest note
alone waits to be written: a slow disk makes notes rarer, it does not pile them up. A note whose task was completed
before it came (of an engine that hung and went on) goes once it is STALE_S older than the newest one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from proto.tensors import Array
from services.rollout.engine import Generation
from services.rollout.versions import BlockVersions


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as far as it goes: `token_ids` int32 [N], `logprobs` float32 [N], `versions` int32 [N] (the policy
    version that sampled each token); `finish_reason` stop, length, or "" while it goes on."""

    token_ids: Array
    logprobs: Array
    versions: Array
    finish_reason: str


def answer_of(generation: Generation, versions: BlockVersions) -> Answer:
    """What an engine sampled, with the version of each token."""
    return Answer(generation.token_ids, generation.logprobs, versions.of(generation.swaps), generation.finish_reason)


NOTHING = Answer(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a lease can go on with: notes of so many `samples` of at most `max_new_tokens`, at its temperature, by
    versions from `oldest` to `newest` of `lineage`."""

    samples: int
    max_new_tokens: int
    temperature: float
    lineage: int
    oldest: int
    newest: int


class _Note(msgspec.Struct, array_like=True):
    token_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str


class _Record(msgspec.Struct):
    task_id: str
    lineage: int
    temperature: float
    samples: list[_Note]


STALE_S = 3600.0
"""Older than the newest note by so many seconds, nobody goes on with it: its task was leased again long ago, or has
ended. Not older than now: a run that is resumed after a week finds what it left."""
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    task_id: str
    lineage: int
    temperature: float
    answers: Sequence[Answer]


class PartialJournal:
    """Notes under one folder. `note` may be called from any thread, and returns at once."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """`every_s`: seconds between two notes of a block."""
        self.every_s = every_s
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="partial")
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._writer.submit(self._sweep)

    def note(self, answers: Mapping[str, Sequence[Answer]], lineage: int, temperature: float) -> None:
        """Put down `answers` (by task id, one a sample) in place of what was noted of these tasks before."""
        with self._lock:
            is_told = bool(self._waiting)
            for task_id, samples in answers.items():
                self._waiting[task_id] = _Waiting(task_id, lineage, temperature, samples)
        if not is_told:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._writer.submit(self._write)

    def forget(self, task_ids: Sequence[str]) -> None:
        """These tasks are completed."""
        with self._lock:
            for task_id in task_ids:
                self._waiting.pop(task_id, None)

        def remove() -> None:
            for task_id in task_ids:
                self._file(task_id).unlink(missing_ok=True)
            self._sweep()

        with contextlib.suppress(RuntimeError):
            self._writer.submit(remove)

    def read(self, task_id: str, wanted: Wanted) -> list[Answer] | None:
        """What there is to go on with, one a sample; a sample that must begin anew is empty. None: nothing is there.

        Blocks: not for the loop's thread.
        """
        try:
            record = msgspec.msgpack.decode(self._file(task_id).read_bytes(), type=_Record)
            answers = [_answer(each) for each in record.samples]
        except (OSError, ValueError):
            return None
        known = (record.task_id, record.lineage, record.temperature, len(answers))
        if known != (task_id, wanted.lineage, wanted.temperature, wanted.samples):
            return None
        kept = [each if _fits(each, wanted) else NOTHING for each in answers]
        return kept if any(len(each.token_ids) for each in kept) else None

    def close(self) -> None:
        """Write what was noted, and no more. A directory that does not answer within CLOSE_S is not waited for."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._writer.submit(lambda: None).result(CLOSE_S)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _sweep(self) -> None:
        """Remove what nobody goes on with."""
        written: dict[Path, float] = {}
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another engine was faster
                written[path] = path.stat().st_mtime
        oldest = max(written.values(), default=0.0) - STALE_S
        for path, at in written.items():
            if at < oldest:
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        with contextlib.suppress(OSError):  # a full disk
            for each in waiting.values():
                target = self._file(each.task_id)
                written = target.with_suffix(f".{os.getpid()}")
                notes = [_note(answer) for answer in each.answers]
                written.write_bytes(
                    msgspec.msgpack.encode(_Record(each.task_id, each.lineage, each.temperature, notes))
                )
                written.rename(target)

    def _file(self, task_id: str) -> Path:
        return self._folder / f"{task_id.replace('/', '-')}.msgpack"


def _note(answer: Answer) -> _Note:
    return _Note(
        token_ids=answer.token_ids.tobytes(),
        logprobs=answer.logprobs.tobytes(),
        versions=answer.versions.tobytes(),
        finish_reason=answer.finish_reason,
    )


def _answer(note: _Note) -> Answer:
    """Raises ValueError when its parts do not belong together."""
    answer = Answer(
        np.frombuffer(note.token_ids, np.int32),
        np.frombuffer(note.logprobs, np.float32),
        np.frombuffer(note.versions, np.int32),
        note.finish_reason,
    )
    if not len(answer.token_ids) == len(answer.logprobs) == len(answer.versions):
        raise ValueError("a note of another number of tokens than log-probs")
    return answer


def _fits(answer: Answer, wanted: Wanted) -> bool:
    if not len(answer.token_ids):
        return True
    longest = wanted.max_new_tokens if answer.finish_reason else wanted.max_new_tokens - 1
    return (
        len(answer.token_ids) <= longest
        and int(answer.versions.min()) >= wanted.oldest
        and int(answer.versions.max()) <= wanted.newest
    )
