"""Notes of samples that are not finished yet, for whoever samples their task next. Must never make a block wait: a note
that is lost costs tokens, nothing else.

One file a task in the run directory, written in one move: a kill leaves the note before or the new one. Engines on one
host share them. Nothing of an exact version (evaluations, deterministic mode) is ever noted.
"""

from __future__ import annotations

import contextlib
import os
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


class PartialJournal:
    """Notes under one folder. `note` may be called from any thread, and returns at once."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """`every_s`: seconds between two notes of a block."""
        self.every_s = every_s
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="partial")

    def note(self, answers: Mapping[str, Sequence[Answer]], lineage: int, temperature: float) -> None:
        """Put down `answers` (by task id, one a sample) in place of what was noted of these tasks before."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._writer.submit(self._write, answers, lineage, temperature)

    def forget(self, task_ids: Sequence[str]) -> None:
        """These tasks are completed."""

        def remove() -> None:
            for task_id in task_ids:
                self._file(task_id).unlink(missing_ok=True)

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
        """Write what was noted, and no more."""
        self._writer.shutdown(wait=True)

    def _write(self, answers: Mapping[str, Sequence[Answer]], lineage: int, temperature: float) -> None:
        with contextlib.suppress(OSError):  # a full disk
            for task_id, samples in answers.items():
                notes = [_note(each) for each in samples]
                target = self._file(task_id)
                written = target.with_suffix(f".{os.getpid()}")
                written.write_bytes(msgspec.msgpack.encode(_Record(task_id, lineage, temperature, notes)))
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
