"""Finds a function by its import path `module:function`. A failure shows at the start of a run, in one line."""

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
    """Return the function at `path`. Its module is looked up on Python's path, then in the current directory.

    `what` describes its purpose in errors (`reward function`). Raises RpcError(bad_request).
    """
    try:
        return import_function(path)
    except ValueError as error:
        raise refused(what, path, str(error)) from error


def builtin_name(path: str, known: Iterable[str], what: str) -> str | None:
    """Return the name in `builtin:<name>`, None for other paths. Raises RpcError(bad_request) for unknown names."""
    module_name, _, name = path.partition(":")
    if module_name != BUILTIN:
        return None
    names = sorted(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1) or names
        raise refused(what, path, f"names no builtin; use builtin:{near[0]}")
    return name


def require(modules: Sequence[str], extra: str, path: str, what: str) -> None:
    """Raise RpcError(bad_request) naming the optional `extra` if one of its `modules` is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise refused(what, path, f"needs the package {module}, install it with: pip install 'rlbus[{extra}]'")


def refused(what: str, path: str, why: str) -> RpcError:
    """Return the one-line error for the `what` at `path`."""
    return RpcError(ErrorCode.BAD_REQUEST, f"{what} {path!r}: {why}"[:600].replace("\n", " "))
