"""Tries the functions that a topology names: `python -m services.rollout.function_check FD`. It imports users' modules,
so whoever starts it must be able to kill it. Must never run one of the functions.

FD is a socket. A JSON list of `Wanted` comes first, then the end of writing; for each of them one JSON line goes back:
its error, "" for a function that a run could use.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from services.rollout.confined import confine
from services.rollout.rewards.load import load_reward
from services.rollout.workflows.load import load_workflow
from shared.rpc.errors import RpcError
from shared.user_function import find_function

ARGUMENTS = 3
"""Positional arguments of an advantage (rewards, groups, loss_tokens) and of a loss (cur, anchor, tokens)."""


class Wanted(msgspec.Struct):
    """One function: where the topology names it, `reward`, `workflow`, `advantage` or `loss`, path and arguments."""

    key: str
    kind: str
    path: str
    params: dict[str, Any]


def problem(wanted: Wanted) -> str:
    """Why a run could not use the function, in one line; empty when it could. Imports it."""
    try:
        if wanted.kind == "reward":
            load_reward(wanted.path, wanted.params)
        elif wanted.kind == "workflow":
            load_workflow(wanted.path, wanted.params)
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
