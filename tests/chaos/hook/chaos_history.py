"""Records the messages about shards and steps that this process exchanged with other processes, as JSON lines in a
separate file.

Times are those of the machine's monotonic clock, which all processes share and no test changes.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class _Recorder:
    def __init__(self, folder: str, process: str) -> None:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{process}-{os.getpid()}.jsonl")
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, begun: float, **values: Any) -> None:
        line = {"kind": kind, "begun": begun, "at": time.monotonic(), **values}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def put(self, function: Function) -> Function:
        """Record a producer's puts that the store has acknowledged."""

        @functools.wraps(function)
        async def put(client: Any, tasks: Any, **named: Any) -> Any:
            begun = time.monotonic()
            receipts = await function(client, tasks, **named)
            keys = sorted({key for task in tasks for key in task.shards})
            self.write("put", begun, keys=keys, tasks=[(each.task_id, each.fence) for each in receipts])
            return receipts

        return put

    def fetch(self, function: Function) -> Function:
        """Record a reader's fetches, including those that were refused because the store lacks the shards."""

        @functools.wraps(function)
        async def fetch(client: Any, wants: Any, *arguments: Any) -> Any:
            begun, tasks = time.monotonic(), [(each.task_id, each.fence) for each in wants.tasks]
            try:
                answer = await function(client, wants, *arguments)
            except Exception as error:
                names = {name.partition("#")[0] for name in getattr(error, "names", [])}
                lacks = [task for task in tasks if task[0] in names]
                code, keys = str(getattr(error, "code", type(error).__name__)), sorted(wants.keys or ())
                self.write("refused", begun, code=code, keys=keys, tasks=lacks)
                raise
            self.write("read", begun, tasks=tasks)
            return answer

        return fetch

    def clear(self, function: Function) -> Function:
        """Record a store's clears. The record is written before the acknowledgement is sent."""

        @functools.wraps(function)
        async def clear(service: Any, request: Any, call: Any) -> Any:
            begun = time.monotonic()
            answer = await function(service, request, call)
            self.write("clear", begun, tasks=[(each.task_id, each.fence) for each in request.tasks])
            return answer

        return clear

    def call(self, function: Function) -> Function:
        """Record a worker's results that the scheduler has accepted, by stage."""

        @functools.wraps(function)
        async def call(client: Any, request: Any, *arguments: Any, **named: Any) -> Any:
            begun = time.monotonic()
            answer = await function(client, request, *arguments, **named)
            if type(request).__name__ == "Complete":
                refused = {(each.task_id, each.fence) for each in answer.refused}
                done = [(each.task_id, each.fence) for each in request.results if each.outcome == 0]
                accepted = [task for task in done if task not in refused]
                self.write("accepted", begun, stage=request.stage, tasks=accepted)
            return answer

        return call

    def commit(self, function: Function) -> Function:
        """Record a driver's commits that the scheduler has acknowledged."""

        @functools.wraps(function)
        async def commit(calls: Any, step: int, *arguments: Any) -> Any:
            begun = time.monotonic()
            answer = await function(calls, step, *arguments)
            self.write("commit", begun, step=step)
            return answer

        return commit


def observers(folder: str, process: str) -> list[tuple[str, str, Callable[[Function], Function]]]:
    """Return (module, function, wrapper) for each observed function."""
    recorder = _Recorder(folder, process)
    return [
        ("shared.dataplane.client", "DataClient.put", recorder.put),
        ("shared.dataplane.client", "DataClient._fetch", recorder.fetch),
        ("services.batch_store.server", "StoreService._clear", recorder.clear),
        ("shared.rpc.client", "Client.call", recorder.call),
        ("services.policy_trainer.scheduler_calls", "SchedulerCalls.commit", recorder.commit),
    ]
