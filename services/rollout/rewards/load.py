"""Finds the reward functions that a topology names. Errors are one line, and are raised at the start of a run."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.rollout.rewards.builtin import BUILTINS
from services.rollout.user_code import builtin_name, find_function, refused, require
from services.rollout.user_trace import Home, home_of

GROUP_PARAMETER = "samples"
WHAT = "reward function"


class Term(Protocol):
    """One function of the topology's section `reward`. `shared.topology` has a class that matches."""

    @property
    def function(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def params(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function. With `group` it takes all samples of a task; with `is_async` it returns a coroutine."""

    name: str
    call: Callable[..., Any]
    params: dict[str, Any]
    group: bool
    is_async: bool
    home: Home = Home()  # noqa: RUF009  # frozen


def is_inline(function: str) -> bool:
    """Whether the function at this import path may run in the service itself, as some builtins may."""
    name = builtin_name(function, BUILTINS, WHAT)
    return name is not None and BUILTINS[name].inline


def load_reward(function: str, params: dict[str, Any]) -> RewardFunction:
    """Return the function at the import path `function`.

    A function whose first parameter is named `samples` scores a group at once. Raises RpcError(bad_request) if the
    path cannot be imported, is not a function, or does not accept `params`.
    """
    call = _find(function, params)
    try:
        signature = inspect.signature(call)
        signature.bind(None, **params)
    except (TypeError, ValueError) as error:
        raise refused(
            WHAT, function, f"cannot be called as fn(sample, **params) with params {sorted(params)} ({error})"
        ) from None
    first = next(iter(signature.parameters), "")
    return RewardFunction(
        name=function,
        call=call,
        params=dict(params),
        group=first == GROUP_PARAMETER,
        is_async=inspect.iscoroutinefunction(call),
        home=home_of(call),
    )


def _find(path: str, params: dict[str, Any]) -> Callable[..., Any]:
    name = builtin_name(path, BUILTINS, WHAT)
    if name is None:
        return find_function(path, WHAT)
    builtin = BUILTINS[name]
    require(builtin.modules, builtin.extra, path, WHAT)
    for module in builtin.modules:
        importlib.import_module(module)  # now, so that the first call's timeout does not include it
    if builtin.check is not None:
        try:
            builtin.check(params)
        except (re.error, KeyError, TypeError) as error:
            raise refused(WHAT, path, f"params {params!r:.100} cannot work ({type(error).__name__}: {error})") from None
    return builtin.call
