"""Makes reasoning-gym's rows for another process: `python -m shared.data.gym_process SOURCE`, one line a row. Must run
with PYTHONHASHSEED=0: five of the 106 data sets of release 0.1.25 go through sets of texts, and give other rows in
every process otherwise (isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note, word_ladder).
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
from pathlib import Path
from typing import Any

from shared.data.gym import GymEntries
from shared.data.source import DataError, SourceLost

HASH_SEED = "0"
START_S = 60.0  # importing the library
START_ATTEMPTS = 3
ANSWER_S = 20.0
ANSWER_ATTEMPTS = 2  # of a row over which the process died; one that was late would be late again
_PACKAGES = Path(__file__).parents[2]


class RowMaker:
    """The other end: asks the process for `{"rows"}` at first, then for `{"question", "answer"}` of an index. One that
    has ended is started again. From any thread."""

    def __init__(self, source: str, *, where: str) -> None:
        """Raises DataError for a data set or parameter that is not."""
        self._source = source
        self._where = where
        self._lock = threading.Lock()
        self._never: dict[int, str] = {}
        """Rows that cannot be made, and why: they are asked for again, if their lease was lost over them."""
        self._process, self.rows = self._started()

    def entry(self, index: int) -> dict[str, Any]:
        """Raises DataError when the data set cannot make it, or not within ANSWER_S, SourceLost when its process makes
        no row at all."""
        with self._lock:
            if index in self._never:
                raise DataError(self._never[index])
            why, attempts = "", 0
            while attempts < ANSWER_ATTEMPTS:
                try:
                    return self._asked(index)
                except _Gone as error:
                    why, attempts = str(error), ANSWER_ATTEMPTS if error.late else attempts + 1
            another = (index + 1) % self.rows
            try:
                self._asked(another)
            except _Gone as error:
                raise SourceLost(
                    f"source {self._source!r}: the process that makes its rows {why} over row {index}, and {error} "
                    f"over row {another}"
                ) from None
            except DataError:
                pass  # that it answers is what counts
            self._never[index] = f"{self._source} row {index}: its process {why}"
            raise DataError(self._never[index])

    def _asked(self, index: int) -> dict[str, Any]:
        """Raises _Gone, in a process that has not been asked before if the last one has ended."""
        if self._process.ended:
            self._process, _ = self._started()
        return self._process.ask(index)

    def _started(self) -> tuple[_Process, int]:
        """A process, and how many rows it has. Raises SourceLost when none will start."""
        why = ""
        for _ in range(START_ATTEMPTS):
            process = _Process(self._source, self._where)
            try:
                return process, int(process.answer(START_S)["rows"])
            except _Gone as error:
                why = str(error)
        raise SourceLost(
            f"{self._where}: source {self._source!r}: the process that makes its rows does not start: it {why}, "
            f"{START_ATTEMPTS} times"
        )


class _Gone(Exception):
    """The process has ended, by itself or because it was late: `it {error}`."""

    def __init__(self, why: str, *, late: bool) -> None:
        super().__init__(why)
        self.late = late


class _Process:
    """One child. Whoever is told _Gone needs another."""

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
        """Raises _Gone, and DataError for what the data set refuses."""
        try:
            _pipe(self._process.stdin).write(f"{index}\n".encode())
            _pipe(self._process.stdin).flush()
        except OSError:
            pass  # its answer says so, too
        return self.answer(ANSWER_S)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """As `ask`."""
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
            raise _Gone(f"gave no answer within {limit_s:g} s" if late.is_set() else how, late=late.is_set())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"])
        return answer


def _pipe(pipe: Any) -> Any:
    """A pipe that was asked for. Raises DataError if it is not there."""
    if pipe is None:
        raise DataError("a process without its pipes")
    return pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def main(source: str, where: str) -> None:
    """Answer until the other end closes the pipe."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not answer
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
        except Exception as error:  # whatever a data set raises over one index
            text = json.dumps({"error": f"{source} row {line.strip()}: {type(error).__name__}: {error}"[:300]})
        print(text, file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
