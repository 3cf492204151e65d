"""Sends this process a signal at a named point: before or after the n-th call to a function of the product.

If CHAOS_HISTORY is set, it also records this process's messages about shards and steps (see `chaos_history`). Python
imports this module at startup when PYTHONPATH names this folder; `tests.chaos.points` writes the variables.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SPARE = "launch.spares.spare"
_forked: list[str] = []
"""The module that this fork of a spare process runs."""
MODEL = "--model"


def _process() -> str:
    """Return the module that `python -m` runs here, or that this fork of a spare process runs as if by `python -m`, and
    which of its models, if it is given one."""
    words = sys.orig_argv
    module = _forked[0] if _forked else words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    given = sys.argv if _forked else words
    return f"{module} {MODEL} {given[given.index(MODEL) + 1]}" if MODEL in given[:-1] else module


class _Point:
    def __init__(self, given: dict[str, Any]) -> None:
        self.module, self.name, self.when = given["module"], given["name"], given["when"]
        self._left, self._signal, self._mark = given["nth"], given["signal"], given["mark"]
        self._match, self._fields = given["match"], given["fields"]

    def _matches(self, argument: Any) -> bool:
        fields = all(getattr(argument, name, None) == value for name, value in self._fields.items())
        return fields and self._match in type(argument).__name__

    def reached(self, arguments: Sequence[Any]) -> None:
        if self._left <= 0 or ((self._match or self._fields) and not any(map(self._matches, arguments))):
            return
        self._left -= 1
        if self._left == 0 and self._first():
            os.kill(os.getpid(), self._signal)

    def _first(self) -> bool:
        """Return whether this process is the first one to reach the point. The mark tells the test which process that
        was, and when.
        """
        if not self._mark:
            return True
        try:
            mark = os.open(self._mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        os.write(mark, json.dumps({"pid": os.getpid(), "process": _process(), "at": time.monotonic()}).encode())
        os.close(mark)
        return True


def _wrapped(function: Callable[..., Any], before: list[_Point], after: list[_Point]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def slow(*arguments: Any, **named: Any) -> Any:
            for point in before:
                point.reached(arguments)
            answer = await function(*arguments, **named)
            for point in after:
                point.reached(arguments)
            return answer

        return slow

    @functools.wraps(function)
    def quick(*arguments: Any, **named: Any) -> Any:
        for point in before:
            point.reached(arguments)
        answer = function(*arguments, **named)
        for point in after:
            point.reached(arguments)
        return answer

    return quick


def _wrap(module: ModuleType, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function `name` (for example `Class.method`) of the module with `wrap(function)`."""
    owner: Any = module
    *owners, last = name.split(".")
    for each in owners:
        owner = getattr(owner, each)
    raw = inspect.getattr_static(owner, last)
    if isinstance(raw, classmethod | staticmethod):
        setattr(owner, last, type(raw)(wrap(raw.__func__)))
    else:
        setattr(owner, last, wrap(raw))


Patch = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: dict[str, list[Patch]]) -> None:
        self._wanted = wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patches = self._wanted.pop(name, None)
        if patches is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def and_patch(module: ModuleType) -> None:
            execute(module)
            for patch in patches:
                patch(module)

        spec.loader.exec_module = and_patch  # type: ignore[method-assign]
        return spec


def _install() -> None:
    wanted: dict[str, list[Patch]] = {}
    folder = os.environ.get("CHAOS_HISTORY")
    if folder and _process().startswith("services."):
        import chaos_history

        for module, name, wrap in chaos_history.observers(folder, _process()):
            wanted.setdefault(module, []).append(functools.partial(_wrap, name=name, wrap=wrap))
    points = [_Point(given) for given in json.loads(os.environ.get("CHAOS_POINTS", "[]")) if _here(given)]
    for module, name in sorted({(point.module, point.name) for point in points}):
        mine = [point for point in points if (point.module, point.name) == (module, name)]
        before, after = ([point for point in mine if point.when == when] for when in ("before", "after"))
        wrap = functools.partial(_wrapped, before=before, after=after)
        wanted.setdefault(module, []).append(functools.partial(_wrap, name=name, wrap=wrap))
    for name in [name for name in wanted if name in sys.modules]:
        for patch in wanted.pop(name):
            patch(sys.modules[name])
    if wanted:
        sys.meta_path.insert(0, _Finder(wanted))


def _here(given: dict[str, Any]) -> bool:
    return bool(given["process"] == _process())


def _install_in_forks() -> None:
    run = runpy.run_module

    def run_module(name: str, *arguments: Any, **named: Any) -> Any:
        _forked.append(name)
        _install()
        return run(name, *arguments, **named)

    runpy.run_module = run_module


if _process() == SPARE:
    _install_in_forks()
else:
    _install()
