"""Checks the functions that a topology names: `python -m services.rollout.user_code.function_check FD`.

The process imports users' modules, so its parent must be able to kill it. It runs none of the functions.

FD is a socket. The process reads a JSON list of `Wanted` up to the end of the stream and answers with one JSON
line for each: its error, or "" for a function that a run could use.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from services.rollout.user_code.confined import confine
from services.rollout.user_code.frames import Purpose
from services.rollout.user_code.load import load
from shared.rpc.errors import RpcError
from shared.user_function import find_function

ARGUMENTS = 3
"""Number of positional arguments of an advantage (rewards, groups, loss_tokens) and of a loss (cur, anchor, tokens)."""


class Wanted(msgspec.Struct):
    """One function: topology key, kind (`reward`, `workflow`, `advantage` or `loss`), import path and arguments."""

    key: str
    kind: str
    path: str
    params: dict[str, Any]


def problem(wanted: Wanted) -> str:
    """Import the function. Return the one-line reason why a run could not use it, or an empty string if it could."""
    try:
        if wanted.kind in tuple(Purpose):
            load(Purpose(wanted.kind), wanted.path, wanted.params)
        else:
            find_function(wanted.path, wanted.key, ARGUMENTS, wanted.params)
    except (RpcError, ValueError) as error:
        return str(error).removeprefix(f"{wanted.key}: ")
    return ""


def main(descriptor: int) -> None:
    link = confine(descriptor)
    if link is None:
        return
    with link, link.makefile("rb") as asked:
        for wanted in msgspec.json.decode(asked.read(), type=list[Wanted]):
            link.sendall(msgspec.json.encode(problem(wanted)) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
