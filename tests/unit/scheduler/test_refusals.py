"""Requests that no worker sends and that would corrupt the journal are refused without any effect."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    Complete,
    ErrorCode,
    LeaseGrant,
    NextBatch,
    Ping,
    PublishWeights,
    Register,
    Registered,
    WeightsRef,
)
from services.scheduler import registry
from services.scheduler.completion import MOST_LAYOUTS
from services.scheduler.events import Fail, WriteRow
from services.scheduler.metrics_file import MetricsFile
from services.scheduler.plan import EvalPlan
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from tests.unit.scheduler.bench import CANARY, STORE, Bench, plan
from tests.unit.shared.rpc.rpc_actors import serving, short_directory


def refused(bench: Bench, request: Any, code: str = ErrorCode.BAD_REQUEST) -> str:
    """Return the reason why `request` is refused, after checking that the journal has not grown."""
    before = len(bench.journal)
    answer = bench.ask(request)
    assert isinstance(answer, Fail), answer
    assert answer.code == code
    assert len(bench.journal) == before
    return answer.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"task_id": "train/0/3"},
        {"task_id": "weights/0/1"},
        {"step": 1 << 31, "task_id": f"weights/0/{1 << 31}"},
        {"step": -1, "task_id": "weights/0/-1"},
        {"nbytes": -1},
        {"fence": 1 << 32},
    ],
)
def test_weights_whose_name_has_another_step_are_refused(wrong: dict[str, Any]) -> None:
    bench = Bench().start()
    right = {
        "lineage": 0, "step": 0, "task_id": "weights/0/0", "fence": 9, "store": STORE, "nbytes": 100,
        "canary": CANARY, "drill": CANARY, "drill_seed": 0,
    }  # fmt: skip
    refused(bench, PublishWeights(driver=1, ref=WeightsRef(**{**right, **wrong})))
    assert not isinstance(bench.ask(PublishWeights(driver=1, ref=WeightsRef(**right))), Fail)


def test_checkpoint_of_a_step_that_is_not_committed_is_refused() -> None:
    bench = Bench().start()
    before = bench.machine.run.history.checkpoint_step
    refused(bench, CheckpointSaved(driver=1, step=4, kept=[4]), ErrorCode.CONFLICT)
    assert bench.machine.run.history.checkpoint_step == before


@pytest.mark.parametrize("wrong", [{"instance": -1}, {"endpoint": "x" * 2000}, {"host": "x" * 2000}])
def test_service_with_an_invalid_instance_or_address_is_not_registered(wrong: dict[str, Any]) -> None:
    bench = Bench().start()
    right = {"service": "rollout", "instance": 0, "incarnation": 7, "pid": 1, "host": "h", "endpoint": ""}
    refused(bench, Register(**{**right, **wrong}))
    assert isinstance(bench.ask(Register(**right)), Registered)


def test_a_surplus_set_of_scalars_is_refused_and_its_lease_stays_open() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    granted = bench.granted()
    layouts = bench.machine.run.ledger.tasks.layouts
    layouts += [((f"y{number}", "<f4"),) for number in range(MOST_LAYOUTS - len(layouts))]
    lease = bench.machine.run.ledger.leases.get(granted.lease_id)
    assert lease is not None
    empty = {"x": np.zeros(0, np.float32)}
    request = Complete(lease_id=granted.lease_id, stage="rollout", incarnation=7, results=[], scalars=empty)
    assert "scalars x: a run may have at most 65536 different sets" in refused(bench, request)
    assert len(lease.tasks) == len(granted.batch.tasks)


@pytest.mark.parametrize("rewards", [[float("inf"), float("-inf")], [math.nan, math.inf]])
def test_evaluation_ends_even_if_its_rewards_have_no_mean(rewards: list[float]) -> None:
    bench = Bench(plan=plan(evals=(EvalPlan("held", range(4), 1, 1),))).start()
    bench.register("rollout", 0, 7)
    for _ in range(20):
        granted = bench.lease()
        if isinstance(granted, LeaseGrant) and granted.split == "held":
            tasks = len(granted.batch.tasks)
            bench.complete(granted, samples=1, reward=(rewards * tasks)[:tasks])
    assert not bench.machine.run.history.evaluations.open
    assert bench.machine.run.history.evaluations.begun("held", 0)


def test_the_drivers_metrics_do_not_set_the_step_of_a_row() -> None:
    bench = Bench().start()
    bench.register("rollout", 0, 7)
    batch = bench.ask(NextBatch(driver=1, step=1))
    ref = bench.calls
    while batch is None:
        bench.complete(bench.granted())
        batch = bench.answer(bench.effects, ref)
    bench.ask(CommitStep(driver=1, step=1, metrics={"step": math.nan, "loss": 2.0}))
    bench.publish(1)
    [row] = [effect.row for effect in bench.effects if isinstance(effect, WriteRow) and "loss" in effect.row]
    assert (row["step"], row["loss"]) == (1.0, 2.0)
    assert next(iter(row)) == "step"


@pytest.mark.parametrize("last", [b"\n", b"{}\n", b"[]\n", b'{"step": 1e999}\n', b"\xff\n", b'{"step": null}\n'])
def test_an_invalid_last_line_of_the_metrics_is_written_again(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + last)
    rows = ['{"step": 0}', '{"step": 1}']
    asked: list[int] = []

    def after(step: int) -> list[str]:
        asked.append(step)
        return rows[step + 1 :]

    made = MetricsFile(path, after, 1, 0)
    made.close()
    assert asked == [0]
    assert path.read_text() == "".join(f"{row}\n" for row in rows)


def test_an_existing_row_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = ['{"step": 1}', '{"step": 2}']
    made = MetricsFile(path, lambda _: rows, 2, 0)
    for row in rows:
        made.write(row)
    made.close()
    assert path.read_text() == "".join(f"{row}\n" for row in rows)


def test_client_given_an_unusable_endpoint_can_use_the_next_one() -> None:
    async def main(folder: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        async with serving(f"ipc://{folder}/echo-0", (Ping, lambda _, __: Ack())) as (_, bound):
            client = Client(context, bound, "echo/0", new_incarnation())
            await client.call(Ping(), Ack, deadline_s=10)
            for _ in range(2):
                with pytest.raises(RpcError, match="tcp needs the run's keys"):
                    client.connect("tcp://127.0.0.1:1")
            client.connect(bound)
            await client.call(Ping(), Ack, deadline_s=10)
            client.close()
        context.term()

    with short_directory() as folder:
        asyncio.run(main(folder))


def test_damaged_lines_of_discarded_rows_do_not_hide_other_rows(tmp_path: Path) -> None:
    kept = tmp_path / "metrics.discarded.jsonl"
    kept.write_bytes(b'{"lineage": 0, "step": 2}\n\xff{"lin\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    MetricsFile(tmp_path / "metrics.jsonl", lambda _: [], 1, 0).close()
    assert kept.read_bytes().splitlines()[2:] == [b'{"lineage": 0, "step": 3}']


def test_instances_and_stores_beyond_their_limits_are_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    here = len(bench.machine.run.shards.registry)
    monkeypatch.setattr(registry, "MOST_STORES", len(bench.machine.run.shards.registry.stores) + 1)
    monkeypatch.setattr(registry, "MOST_INSTANCES", here + 2)

    def register(service: str, instance: int) -> Register:
        return Register(service=service, instance=instance, incarnation=9, pid=1, host="h", endpoint="")

    assert isinstance(bench.ask(register("batch-store", 7)), Registered)
    assert "stores are registered" in refused(bench, register("batch-store", 8))
    assert isinstance(bench.ask(register("rollout", 7)), Registered)
    assert "instances are registered" in refused(bench, register("rollout", 8))
    assert isinstance(bench.ask(register("rollout", 7)), Registered)
