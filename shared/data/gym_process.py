"""Makes reasoning-gym's rows for another process: `python -m shared.data.gym_process SOURCE`, one line a row. Must run
with PYTHONHASHSEED=0: five of the 106 data sets of release 0.1.25 go through sets of texts, and give other rows in
every process otherwise (isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note, word_ladder).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from shared.data.gym import GymEntries
from shared.data.source import DataError

HASH_SEED = "0"
ANSWER_S = 60.0
_PACKAGES = Path(__file__).parents[2]


class RowMaker:
    """The other end: asks the process for `{"rows"}` at first, then for `{"question", "answer"}` of an index."""

    def __init__(self, source: str, *, where: str) -> None:
        """Raises DataError for a data set or parameter that is not."""
        self._source = source
        self._lock = threading.Lock()
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shared.data.gym_process", source, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED},
        )
        weakref.finalize(self, _end, self._process)
        self.rows = int(self._answer()["rows"])

    def entry(self, index: int) -> dict[str, Any]:
        """Raises DataError when the data set cannot make it, or not within ANSWER_S."""
        with self._lock:
            try:
                _pipe(self._process.stdin).write(f"{index}\n".encode())
                _pipe(self._process.stdin).flush()
            except OSError as error:
                raise DataError(f"source {self._source!r}: the process that makes its rows is gone ({error})") from None
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        watch = threading.Timer(ANSWER_S, self._process.kill)
        watch.start()
        try:
            line = _pipe(self._process.stdout).readline()
        finally:
            watch.cancel()
        if not line:
            raise DataError(f"source {self._source!r}: no row within {ANSWER_S:g} s, or its process died")
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
