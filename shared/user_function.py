"""Finds a function that a topology names by import path, `my.module:fn`. Must fail at start, in one line; must never
take a path from a message: only the topology says what is imported.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def import_function(path: str) -> Callable[..., Any]:
    """The function at `path`; its module is looked for on Python's path, then in the current directory.

    Raises ValueError, which says why and leaves it to the caller to say for what.
    """
    module_name, _, name = path.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's folder must not hide our packages
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ValueError(f"cannot be imported from {folder} ({type(error).__name__}: {error})") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{module.__file__} has no function {name!r}")
    function: Callable[..., Any] = found
    return function


def find_function(path: str, key: str, arguments: int, params: Mapping[str, object]) -> Callable[..., Any]:
    """As `import_function`; it must take `arguments` positional arguments and the keywords `params`.

    `key`: where the topology names it. Raises ValueError, one line, for what cannot be imported, is no function or
    takes other arguments.
    """
    try:
        function = import_function(path)
    except ValueError as error:
        raise ValueError(_line(key, path, str(error))) from error
    try:
        inspect.signature(function).bind(*[None] * arguments, **params)
    except (TypeError, ValueError) as error:
        why = f"cannot be called with {arguments} arguments and params {sorted(params)} ({error})"
        raise ValueError(_line(key, path, why)) from None
    return function


def _line(key: str, path: str, why: str) -> str:
    return f"{key}: {path!r}: {why}"[:600].replace("\n", " ")
