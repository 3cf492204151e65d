"""A peer that holds the service key sends well-formed requests with hostile values to live services. Each request is
answered, or refused with a reason. No service dies, shows a defect or grows."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from proto.errors import WireError
from proto.messages import ErrorCode, FinishRun, Ping, Pong, PutTask, StoreStats, TaskResult, Telemetry
from proto.registry import Message, Request, all_messages
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from tests.integration.store_scheduler import REPOSITORY, Bench, bench_of, make_run

REQUESTS = 2400
AT_ONCE = 48
CALL_S = 0.5
GROWTH_BYTES = 64 << 20
SERVICES = ("scheduler", "batch-store", "monitor")
INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 2.5, 1e308, -1e308, 1e-300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "", "train/0/0", "train/0/1", "train/0/" + "9" * 30, "weights/0/0", "a/b", "../../etc/passwd", "\0", "x" * 3000,
    "rollout", "reference", "scheduler", "batch-store", "batch-store/0", "batch-store/99999999999999999999",
    "policy-trainer", "held", "token_ids", "0" * 32, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 50,
)  # fmt: skip
DTYPES = (np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_)


@dataclass
class Attacker:
    """A peer that builds message bodies of any type. `known` maps field names to values that pass the first checks."""

    dice: random.Random
    known: dict[str, list[Any]]

    def body(self, kind: type[msgspec.Struct]) -> Any:
        hints = typing.get_type_hints(kind)
        values = {}
        for field in msgspec.structs.fields(kind):
            plausible = self.known.get(field.name)
            use = plausible is not None and self.dice.random() < 0.7
            values[field.name] = self.dice.choice(plausible or [None]) if use else self.value(hints[field.name])
        return kind(**values)

    def value(self, hint: Any) -> Any:
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if hint is np.ndarray or origin is np.ndarray:
            return self.array()
        if origin in (typing.Union, types.UnionType):
            return self.value(self.dice.choice(inside))
        if origin is list:
            return [self.value(inside[0]) for _ in range(self.dice.choice((0, 1, 1, 2, 20)))]
        if origin is dict:
            return {self.value(inside[0]): self.value(inside[1]) for _ in range(self.dice.choice((0, 1, 3, 20)))}
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.body(hint)
        choices: dict[Any, tuple[Any, ...]] = {int: INTEGERS, float: FLOATS, str: TEXTS, bool: (True, False)}
        return self.dice.choice(choices.get(hint, (None,)))

    def array(self) -> Any:
        dtype = self.dice.choice(DTYPES)
        values = np.array([self.dice.choice((0, 1, 200)) for _ in range(self.dice.choice((0, 1, 2, 4, 8, 100)))])
        flat = values.astype(dtype)
        return self.dice.choice((flat, flat.reshape(-1, 1), np.zeros((), dtype), np.zeros((0, 3), dtype)))


async def attack(bench: Bench) -> None:
    driver = await bench.driver()
    await driver.publish(0)
    worker = await bench.actor("rollout")
    grant = await worker.lease()
    assert grant is not None
    tasks = [PutTask(task.task_id, task.fence) for task in grant.batch.tasks]
    dice = random.Random(5)
    attacker = Attacker(dice, {})
    results = [
        [TaskResult(task.task_id, task.fence, outcome, *rest) for task in tasks]
        for outcome in (0, 1, 2, 9, -1)
        for rest in ((), ("batch-store/0", 2**64 - 1, 4, -1, 2**63), ("nobody/0", 1, 2**63, 2**63, -1))
    ]
    attacker.known = {
        "incarnation": [worker.life],
        "driver": [driver.life],
        "lease_id": [grant.lease_id],
        "stage": ["rollout", "reference"],
        "service": ["rollout", "batch-store"],
        "instance": [0, 1],
        "tasks": [tasks, tasks * 2, [PutTask(tasks[0].task_id, -1)], [PutTask(tasks[0].task_id, 2**63)]],
        "results": results,
        "put_id": ["0" * 32, "a" * 32],
    }
    pids = {service: _pid(bench, service) for service in SERVICES}
    clients = {
        service: Client(bench.context, bench.run.endpoint(service, 0), service, worker.life) for service in SERVICES
    }
    with contextlib.ExitStack() as stack:
        for client in clients.values():
            stack.callback(client.close)
        await _bombard(attacker, clients, pids)
    stats: StoreStats = await worker.stats()
    assert 0 <= stats.bytes <= stats.limit_bytes


async def sent(message: Message, client: Client, outcomes: Counter[str], *, deadline_s: float) -> str:
    """Send `message` and count its outcome. Return the defect that the outcome shows, or an empty string."""
    try:
        if isinstance(message, Request):
            await client.exchange(message, deadline_s=deadline_s)
        else:
            client.tell(message)
        outcomes["answered"] += 1
    except WireError:
        outcomes["unsendable"] += 1
    except RpcError as error:
        outcomes[error.code] += 1
        if error.code == ErrorCode.INTERNAL:
            return f"{error} <- {message!r:.300}"
    return ""


async def _bombard(attacker: Attacker, clients: dict[str, Client], pids: dict[str, int]) -> None:
    dice = attacker.dice
    for client in clients.values():
        await client.call(Ping(), Pong, deadline_s=20)
    before = {service: psutil.Process(pid).memory_info().rss for service, pid in pids.items()}
    # A finished run refuses everything.
    kinds = [kind for kind in all_messages().values() if issubclass(kind, Request) and kind is not FinishRun]
    outcomes: Counter[str] = Counter()
    defects: list[str] = []

    async def one(kind: type[Message]) -> None:
        service = dice.choice(SERVICES)
        message = attacker.body(kind)
        defect = await sent(message, clients[service], outcomes, deadline_s=CALL_S)
        if defect:
            defects.append(defect)

    for _ in range(REQUESTS // AT_ONCE):
        await asyncio.gather(*(one(dice.choice((*kinds, Telemetry, Telemetry))) for _ in range(AT_ONCE)))
    assert not defects, "\n".join(sorted(set(defects)))
    assert min(outcomes["answered"], outcomes[ErrorCode.BAD_REQUEST], outcomes[ErrorCode.CONFLICT]) > 20, outcomes
    for service, client in clients.items():
        await client.call(Ping(), Pong, deadline_s=20)
        assert psutil.Process(pids[service]).memory_info().rss - before[service] < GROWTH_BYTES, service


def _pid(bench: Bench, service: str) -> int:
    words = f"services.{service.replace('-', '_')}"
    return next(
        process.pid
        for process in psutil.process_iter()
        if words in (line := _command(process)) and str(bench.run.path) in line
    )


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextlib.contextmanager
def monitor(path: Path) -> Iterator[None]:
    words = [sys.executable, "-m", "services.monitor", "--run", str(path)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def test_hostile_values_are_refused_with_a_reason_by_every_live_service(tmp_path: Path) -> None:
    run = make_run(tmp_path, store="memory: 64MiB")

    async def main() -> None:
        async with bench_of(run) as bench:
            with monitor(run.path):
                await attack(bench)

    asyncio.run(main())
