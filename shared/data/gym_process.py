"""`reasoning-gym:<dataset>?size=..&seed=..`: procedural tasks from the reasoning-gym library as rows, made in another
process, one line per row: `python -m shared.data.gym_process SOURCE WHERE`.

It runs with PYTHONHASHSEED=0. Five of the 106 data sets of release 0.1.25 iterate over sets of strings and would
otherwise produce different rows in every process (isomorphic_strings, knight_swap, polynomial_multiplication,
ransom_note, word_ladder).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any

from shared.data.gym import EXTRA, GYM_KEY, PACKAGE, GymEntries
from shared.data.source import DataError, OnRow, Row, RowError, SourceLost, check_index, require

HASH_SEED = "0"
START_S = 60.0  # for importing the library
START_ATTEMPTS = 3
ANSWER_S = 20.0
ANSWER_ATTEMPTS = 2  # attempts at a row that makes the process die; a row that takes too long is not retried
_PACKAGES = Path(__file__).parents[2]


class GymSource:
    """Rows `{"id", "prompt", "answer", "reasoning_gym"}`. The query may set `size` (default 1000) and `seed` (default
    0)."""

    def __init__(self, name: str, *, where: str) -> None:
        require(PACKAGE, EXTRA, f"{where}: source {name!r}")
        self.name = name
        self._release = metadata.version(PACKAGE.replace("_", "-"))
        self._maker = RowMaker(name, where=where)

    def __len__(self) -> int:
        return self._maker.rows

    def row(self, index: int) -> Row:
        check_index(index, len(self), self.name)
        entry = self._maker.entry(index)
        return {
            "id": f"{self.name}#{index}",
            "prompt": entry["question"],
            "answer": entry["answer"],
            GYM_KEY: {"source": self.name, "index": index},
        }

    def place(self, index: int) -> str:
        return f"{self.name} row {index}"

    def content(self, index: int) -> bytes:
        """Return the index and the release of the library, because making all rows would take too long."""
        return f"{PACKAGE} {self._release}: {index}".encode()

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        """Return no errors, because making all rows to check them would take too long."""
        if on_row is not None:
            for index in range(len(self)):
                on_row(self.content(index), None)
        return []


class RowMaker:
    """The client of a process that makes rows.

    The process first sends `{"rows"}`, then answers requests for an index with `{"question", "answer"}`. The client
    replaces a process that has ended. Any thread may call the client's methods.
    """

    def __init__(self, source: str, *, where: str) -> None:
        """Raises DataError for an unknown data set or parameter, and SourceLost if no process starts."""
        self._source = source
        self._where = where
        self._lock = threading.Lock()
        self._failed_rows: dict[int, str] = {}
        """Reasons why rows cannot be made, by index. They are kept because a row is requested again if its lease was
        lost."""
        self._process, self.rows = self._start()

    def entry(self, index: int) -> dict[str, Any]:
        """Return entry `index`.

        Raises DataError if the data set cannot make this entry within ANSWER_S seconds, and SourceLost if the process
        then cannot make a different entry, either.
        """
        with self._lock:
            if index in self._failed_rows:
                raise DataError(self._failed_rows[index])
            why, attempts = "", 0
            while attempts < ANSWER_ATTEMPTS:
                try:
                    return self._request(index)
                except _ProcessEnded as error:
                    why, attempts = str(error), ANSWER_ATTEMPTS if error.late else attempts + 1
            another = (index + 1) % self.rows
            try:
                self._request(another)
            except _ProcessEnded as error:
                raise SourceLost(
                    f"source {self._source!r}: the process that makes its rows {why} at row {index}, and {error} "
                    f"at row {another}"
                ) from None
            except DataError:
                pass  # an error is an answer, too
            self._failed_rows[index] = f"{self._source} row {index}: its process {why}"
            raise DataError(self._failed_rows[index])

    def _request(self, index: int) -> dict[str, Any]:
        """Request a row, from a new process if the last one has ended. Raises _ProcessEnded."""
        if self._process.ended:
            self._process, _ = self._start()
        return self._process.ask(index)

    def _start(self) -> tuple[_Process, int]:
        """Start a process and return it with its number of rows. Raises SourceLost if all attempts fail."""
        why = ""
        for _ in range(START_ATTEMPTS):
            process = _Process(self._source, self._where)
            try:
                return process, int(process.answer(START_S)["rows"])
            except _ProcessEnded as error:
                why = str(error)
        raise SourceLost(
            f"{self._where}: source {self._source!r}: the process that makes its rows does not start: it {why}, "
            f"{START_ATTEMPTS} times"
        )


class _ProcessEnded(Exception):
    """The process has ended on its own, or was killed because its answer was late.

    The message completes a sentence: `it {error}`.
    """

    def __init__(self, why: str, *, late: bool) -> None:
        super().__init__(why)
        self.late = late


class _Process:
    """One child process, which is unusable after _ProcessEnded."""

    def __init__(self, source: str, where: str) -> None:
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shared.data.gym_process", source, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED},
        )
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def ended(self) -> bool:
        return not self._end.alive

    def ask(self, index: int) -> dict[str, Any]:
        """Return a row. Raises _ProcessEnded, and DataError if the data set refuses the index."""
        try:
            _pipe(self._process.stdin).write(f"{index}\n".encode())
            _pipe(self._process.stdin).flush()
        except OSError:
            pass  # reading the answer then raises _ProcessEnded
        return self.answer(ANSWER_S)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Read one answer within `limit_s` seconds. Raises the same errors as `ask`."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        watch = threading.Timer(limit_s, end)
        watch.start()
        try:
            line: bytes = _pipe(self._process.stdout).readline()
        finally:
            watch.cancel()
        if not line.endswith(b"\n"):
            self._end()
            code = self._process.returncode
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise _ProcessEnded(f"gave no answer within {limit_s:g} s" if late.is_set() else how, late=late.is_set())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"])
        return answer


def _pipe(pipe: Any) -> Any:
    """Return `pipe`. Raises DataError if `pipe` is None."""
    if pipe is None:
        raise DataError("the process that makes rows has no pipes")
    return pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def main(source: str, where: str) -> None:
    """Answer requests until the other end closes the pipe."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that the library prints must not be mistaken for answers
    try:
        entries = GymEntries(source, where=where)
    except DataError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"rows": len(entries)}), file=out, flush=True)
    for line in sys.stdin:
        try:
            entry = entries.entry(int(line))
            answer = {"question": str(entry["question"]), "answer": entry["answer"]}
            text = json.dumps(answer, default=str)
        except Exception as error:  # a data set can raise anything
            text = json.dumps({"error": f"{source} row {line.strip()}: {type(error).__name__}: {error}"[:300]})
        print(text, file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
