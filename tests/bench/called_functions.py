"""Records which functions of the product a process calls.

`recorded` makes every Python process that is started meanwhile import this module (through a `sitecustomize`), which
then installs a profile function in the main thread and in every later thread. A call is recorded while `Switch` is on,
once for each function and process. A process that is forked without a new interpreter goes on recording, into a file
of its own. An interpreter that starts without `site` (`python -S`) records nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
PRODUCT = ("proto", "shared", "services", "launch")
FOLDER_VARIABLE = "RLBUS_CALLED_FUNCTIONS"
SWITCH = "switch"


@dataclass(frozen=True, order=True)
class Function:
    """A function of the product: its file below the checkout and its qualified name. Functions without a name (lambdas,
    comprehensions) of one owner count as one."""

    file: str
    name: str


class Switch:
    """One byte that all processes of a run share: whether calls are recorded now."""

    def __init__(self, folder: Path) -> None:
        with (folder / SWITCH).open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    @property
    def on(self) -> bool:
        return self._byte[0] != 0

    def turn(self, on: bool) -> None:
        self._byte[0] = int(on)


class CallRecorder:
    """While the switch is on, writes a line to `folder`/PID at the first call of each function."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._switch = Switch(folder)
        self._places = tuple(f"{ROOT / name}{os.sep}" for name in PRODUCT)
        self._seen: dict[int, CodeType] = {}
        words = sys.orig_argv  # `sys.argv` is not set yet
        self._program = words[words.index("-m") + 1] if "-m" in words else " ".join(words[1:2])

    def install(self) -> None:
        os.register_at_fork(after_in_child=self._seen.clear)
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self._switch.on or id(code) in self._seen:
            return
        self._seen[id(code)] = code  # keeps the code object, and so its id
        if code.co_filename.startswith(self._places):
            file = os.path.relpath(code.co_filename, ROOT)
            with (self._folder / str(os.getpid())).open("a") as output:
                output.write(f"{self._program}\t{file}\t{code.co_qualname}\n")


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[tuple[Switch, dict[str, str]]]:
    """Prepare `folder` for records. Yield the switch, which is off, and the environment variables with which a process
    and its children record their calls."""
    (folder / SWITCH).write_bytes(b"\0")
    (folder / "sitecustomize.py").write_text(f"import {__name__}\n\n{__name__}.install()\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    yield Switch(folder), {FOLDER_VARIABLE: str(folder), "PYTHONPATH": path}


def install() -> None:
    """Record the calls of this process, if it was started with the variables of `recorded`."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        CallRecorder(Path(folder)).install()


def read(folder: Path) -> dict[str, set[Function]]:
    """Return the recorded functions by program. Processes of the same program are merged."""
    programs: dict[str, set[Function]] = {}
    for file in folder.iterdir():
        if file.name.isdigit():
            for line in file.read_text().splitlines():
                program, path, name = line.split("\t")
                programs.setdefault(program, set()).add(Function(path, name))
    return programs
