"""Observes a world's processes: the calls that are reported to the checks, and the operations at which a process can
die."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from services.batch_store.files import StoreFiles
from services.batch_store.server import StoreService
from services.batch_store.tombstones import TombstoneList
from services.scheduler.journal import Journal
from services.scheduler.server import SchedulerService
from services.scheduler.state import Scheduler
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Mailbox
from tests.sim.clock import CURRENT
from tests.sim.virtual import here


def _deadly(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method before and after which its process can die."""
    name = real.__name__

    @functools.wraps(real)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        world, node = here(), CURRENT.get()
        world.operation(node, f"before {name}")
        result = real(self, *args, **kwargs)
        world.operation(node, f"after {name}")
        return result

    return method


def _handled(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Scheduler.handle` under observation."""

    @functools.wraps(real)
    def handle(self: Any, event: Any, now: float) -> Any:
        effects = real(self, event, now)
        here().checks.handled(self, event, effects)
        return effects

    return handle


def _committed(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Journal.commit` under observation. A commit that writes something may be the process's last operation."""

    @functools.wraps(real)
    def commit(self: Any) -> None:
        if not self._events and not self._saves:
            real(self)
            return
        world, node = here(), CURRENT.get()
        world.operation(node, "before commit")
        real(self)
        world.checks.committed()
        world.operation(node, "after commit")

    return commit


def _carried_out(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `SchedulerService._carry_out` under observation."""

    @functools.wraps(real)
    def carry_out(self: Any, effect: Any) -> None:
        here().checks.carried_out(effect)
        real(self, effect)

    return carry_out


def _once(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Mailbox.handle`, whose handlers are observed: a caller's request never reaches a handler twice."""

    @functools.wraps(real)
    def register(self: Any, request: Any, handler: Any) -> Any:
        seen: set[tuple[int, int]] = set()

        def observed(body: Any, call: Any) -> Any:
            key = (call.incarnation, call.request_id)
            if not call.one_way:
                here().check(key not in seen, f"a {type(body).__name__} was executed twice")
                seen.add(key)
            return handler(body, call)

        return real(self, request, observed)

    return register


def _failed(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Mailbox._fail` under observation: handlers of living processes raise only RpcError."""

    @functools.wraps(real)
    def fail(self: Any, call: Any, body: Any, error: Exception) -> None:
        node = CURRENT.get()
        expected = isinstance(error, RpcError) or node is None or not node.alive
        here().check(expected, f"a {type(body).__name__} failed: {type(error).__name__}: {error}")
        real(self, call, body, error)

    return fail


def _sealed(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `StoreService._seal` under observation."""

    @functools.wraps(real)
    async def seal(self: Any, request: Any, call: Any) -> Any:
        answer = await real(self, request, call)
        here().checks.sealed(self, request.put_id)
        return answer

    return seal


def _acknowledged(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return `StoreService._clear` under observation."""

    @functools.wraps(real)
    async def clear(self: Any, request: Any, call: Any) -> Any:
        tasks = list(request.tasks)
        here().checks.clearing(tasks)
        answer = await real(self, request, call)
        here().checks.acknowledged(tasks)
        return answer

    return clear


@contextmanager
def observers() -> Iterator[None]:
    """Observe all processes."""
    observed: list[tuple[type, str, Callable[[Any], Any]]] = [
        (Journal, "commit", _committed),
        (Scheduler, "handle", _handled),
        (SchedulerService, "_carry_out", _carried_out),
        (StoreService, "_seal", _sealed),
        (StoreService, "_clear", _acknowledged),
        (Mailbox, "handle", _once),
        (Mailbox, "_fail", _failed),
        *((StoreFiles, name, _deadly) for name in ("create", "seal", "retire")),
        (TombstoneList, "append", _deadly),
    ]
    with ExitStack() as stack:
        for owner, name, wrapper in observed:
            stack.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))
        yield
