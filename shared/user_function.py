"""Finds a function that a topology names by import path, `my.module:fn`. Errors are raised at the start of a run, each
with a one-line message.

Paths come from the topology only, not from messages.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def import_function(path: str) -> Callable[..., Any]:
    """Return the function at `path`. Its module is looked up on Python's path, then in the current directory.

    Raises ValueError with the reason; the caller adds the key and the path.
    """
    module_name, _, name = path.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a user's folder does not hide our packages
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # anything that the user's module raises during import
        raise ValueError(f"cannot be imported from {folder} ({type(error).__name__}: {error})") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{module.__file__} has no function {name!r}")
    function: Callable[..., Any] = found
    return function


def find_function(path: str, key: str, arguments: int, params: Mapping[str, object]) -> Callable[..., Any]:
    """Return the function at `path`, which must accept `arguments` positional arguments and the keyword arguments
    `params`.

    `key` is the topology key that names it. Raises a one-line ValueError if the path cannot be imported, is not a
    function, or does not accept the arguments.
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
