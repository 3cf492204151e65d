"""Finds a function by its import path `module:function`. Must fail at the start of a run, in one line, never later."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.user_function import import_function

BUILTIN = "builtin"


def find_function(path: str, what: str) -> Callable[..., Any]:
    """The function at `path`; its module is looked for on Python's path, then in the current directory.

    `what` is it for, in errors (`reward function`). Raises RpcError(bad_request).
    """
    try:
        return import_function(path)
    except ValueError as error:
        raise refused(what, path, str(error)) from error


def builtin_name(path: str, known: Iterable[str], what: str) -> str | None:
    """The name in `builtin:<name>`, None for another import path. Raises RpcError(bad_request) for an unknown one."""
    module_name, _, name = path.partition(":")
    if module_name != BUILTIN:
        return None
    names = sorted(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1) or names
        raise refused(what, path, f"names no builtin; use builtin:{near[0]}")
    return name


def require(modules: Sequence[str], extra: str, path: str, what: str) -> None:
    """Raises RpcError(bad_request) naming the optional `extra` when one of its `modules` is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise refused(what, path, f"needs the package {module}, install it with: pip install 'rlbus[{extra}]'")


def refused(what: str, path: str, why: str) -> RpcError:
    """The error of one line for the `what` at `path`."""
    return RpcError(ErrorCode.BAD_REQUEST, f"{what} {path!r}: {why}"[:600].replace("\n", " "))
