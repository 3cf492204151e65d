"""Notes of unfinished samples, for the engine that samples their task next.

Blocks never wait for a note; losing a note only costs tokens. Each task has one file in the run directory. The file is
replaced by a rename, so a kill leaves either the previous note or the new one. Engines on one host share the files. No
notes are written for leases that require one exact version (evaluations, deterministic mode). Only a task's newest note
waits to be written, so on a slow disk notes are written less often instead of piling up. A note that was written only
after its task was completed (because its engine hung and then continued) is removed once it is STALE_S older than the
newest note.
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

from services.rollout.engine import FinishReason
from services.rollout.sampling.trajectory import Completion

NOTHING = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), FinishReason.UNFINISHED)


@dataclass(frozen=True, slots=True)
class ResumableNotes:
    """The notes that a lease can resume: `samples` answers of at most `max_new_tokens` tokens, sampled at `temperature`
    by the versions `oldest` to `newest` of `lineage`."""

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
    finish_reason: FinishReason


class _TaskNotes(msgspec.Struct):
    task_id: str
    lineage: int
    temperature: float
    samples: list[_Note]


STALE_S = 3600.0
"""Maximum seconds by which a note may be older than the newest one. A task whose note is older than that was leased
again long ago or has ended. The age is not measured from the current time, so a run that is resumed after a week finds
its notes."""
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _WaitingNote:
    task_id: str
    lineage: int
    temperature: float
    answers: Sequence[Completion]


class PartialJournal:
    """The notes in one folder. `note` may be called from any thread and returns at once."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """`every_s` is the number of seconds between two notes for a block."""
        self.every_s = every_s
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="partial")
        self._lock = threading.Lock()
        self._waiting: dict[str, _WaitingNote] = {}
        self._writer.submit(self._sweep)

    def note(self, answers: Mapping[str, Sequence[Completion]], lineage: int, temperature: float) -> None:
        """Write `answers` (by task id, one per sample) in place of the previous notes of these tasks."""
        with self._lock:
            is_scheduled = bool(self._waiting)
            for task_id, samples in answers.items():
                self._waiting[task_id] = _WaitingNote(task_id, lineage, temperature, samples)
        if not is_scheduled:
            with contextlib.suppress(RuntimeError):  # the writer might have been closed in the meantime
                self._writer.submit(self._write)

    def forget(self, task_ids: Sequence[str]) -> None:
        """Remove the notes of completed tasks."""
        with self._lock:
            for task_id in task_ids:
                self._waiting.pop(task_id, None)

        def remove() -> None:
            for task_id in task_ids:
                self._file(task_id).unlink(missing_ok=True)
            self._sweep()

        with contextlib.suppress(RuntimeError):
            self._writer.submit(remove)

    def read(self, task_id: str, wanted: ResumableNotes) -> list[Completion] | None:
        """Return the answers to resume, one per sample, or None if there is nothing to resume.

        The answers for samples that must start over are empty. This method blocks, so do not call it on the loop's
        thread.
        """
        try:
            record = msgspec.msgpack.decode(self._file(task_id).read_bytes(), type=_TaskNotes)
            answers = [_answer(note) for note in record.samples]
        except (OSError, ValueError):
            return None
        of = (record.task_id, record.lineage, record.temperature, len(answers))
        if of != (task_id, wanted.lineage, wanted.temperature, wanted.samples):
            return None
        kept = [answer if _fits(answer, wanted) else NOTHING for answer in answers]
        return kept if any(len(answer.token_ids) for answer in kept) else None

    def close(self) -> None:
        """Write the pending notes and stop. If the directory does not respond, wait at most CLOSE_S."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._writer.submit(lambda: None).result(CLOSE_S)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _sweep(self) -> None:
        """Remove stale notes."""
        written: dict[Path, float] = {}
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another engine might have removed it
                written[path] = path.stat().st_mtime
        oldest = max(written.values(), default=0.0) - STALE_S
        for path, at in written.items():
            if at < oldest:
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        with contextlib.suppress(OSError):  # the disk may be full
            for note in waiting.values():
                target = self._file(note.task_id)
                written = target.with_suffix(f".{os.getpid()}")
                notes = [_note(answer) for answer in note.answers]
                written.write_bytes(
                    msgspec.msgpack.encode(_TaskNotes(note.task_id, note.lineage, note.temperature, notes))
                )
                written.rename(target)

    def _file(self, task_id: str) -> Path:
        return self._folder / f"{task_id.replace('/', '-')}.msgpack"


def _note(answer: Completion) -> _Note:
    return _Note(
        token_ids=answer.token_ids.tobytes(),
        logprobs=answer.logprobs.tobytes(),
        versions=answer.versions.tobytes(),
        finish_reason=answer.finish_reason,
    )


def _answer(note: _Note) -> Completion:
    """Decode a note. Raises ValueError if its parts differ in length."""
    answer = Completion(
        np.frombuffer(note.token_ids, np.int32),
        np.frombuffer(note.logprobs, np.float32),
        np.frombuffer(note.versions, np.int32),
        note.finish_reason,
    )
    if not len(answer.token_ids) == len(answer.logprobs) == len(answer.versions):
        raise ValueError("a note's numbers of tokens, log-probs and versions differ")
    return answer


def _fits(answer: Completion, wanted: ResumableNotes) -> bool:
    if not len(answer.token_ids):
        return True
    longest = wanted.max_new_tokens if answer.finish_reason else wanted.max_new_tokens - 1
    return (
        len(answer.token_ids) <= longest
        and int(answer.versions.min()) >= wanted.oldest
        and int(answer.versions.max()) <= wanted.newest
    )
