"""Tests the life cycle of a service: states reported to a supervisor, signals, ownership of endpoints, heartbeats."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from proto.messages import (
    Ack,
    ErrorCode,
    GetInventory,
    Heartbeat,
    HeartbeatAck,
    Inventory,
    Ping,
    Pong,
    Register,
    Registered,
    ServiceReport,
    Telemetry,
)
from shared.actor.service import UNUSABLE_STATUS, ProcessState, Service
from shared.actor.telemetry import TelemetrySender
from shared.rpc.errors import BadInput, RpcError
from shared.rundir import RunDir
from tests.unit.shared.rpc.rpc_actors import DEADLINE_S, Echo, asking, double, eventually, line_of, process, serving

pytestmark = pytest.mark.slow

START_S = 60.0
"""Maximum time, in seconds, in which a process with imports starts and ends."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    yield made
    made.remove_volatile()


class Quiet(Service):
    """A service that reports to a supervisor but has no scheduler."""

    NAME = "quiet"
    HEARTBEATS = False


class BadRequest(RpcError):
    """The answer of a peer that refuses a request."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.BAD_REQUEST, message)


def reports(run: RunDir, seen: list[ServiceReport]) -> Any:
    return serving(run.endpoint("supervisor", 0), (ServiceReport, lambda body, _: seen.append(body) or Ack()))


@asynccontextmanager
async def living(service: Service, state: str = ProcessState.READY) -> AsyncIterator[asyncio.Task[int]]:
    """Run the service on this loop, and stop it at the end."""
    task = asyncio.create_task(service.run_until_stopped())
    await eventually(lambda: service.state == state)
    try:
        yield task
    finally:
        service.request_stop()
        async with asyncio.timeout(DEADLINE_S):
            await task


def test_supervisor_hears_every_state_in_order(run: RunDir) -> None:
    async def main() -> None:
        seen: list[ServiceReport] = []
        async with reports(run, seen):
            service = Quiet(run, 3, run.endpoint("supervisor", 0))
            async with living(service) as task:
                pass
            assert task.result() == 0
        assert [report.state for report in seen] == ["STARTING", "READY", "DRAINING", "STOPPED"]
        assert {(r.service, r.instance, r.pid, r.incarnation) for r in seen} == {
            ("quiet", 3, os.getpid(), service.incarnation)
        }
        assert {report.endpoint for report in seen} == {run.endpoint("quiet", 3)}

    asyncio.run(main())


def test_a_subclass_may_use_any_private_name(run: RunDir) -> None:
    """The names of the base class are mangled, so an attribute of a subclass replaces none of them."""

    async def main() -> None:
        seen: list[ServiceReport] = []
        async with reports(run, seen):
            service = Quiet(run, 0, run.endpoint("supervisor", 0))
            private = {name for name in [*vars(Service), *vars(service)] if name.startswith("_") and name[1] != "_"}
            assert len(private) >= 20
            for name in private:
                setattr(service, f"_{name.partition('__')[2] or name[1:]}", None)
            async with living(service):
                pass
        assert [report.state for report in seen] == ["STARTING", "READY", "DRAINING", "STOPPED"]
        assert [name for name in private if not name.startswith("_Service__")] == []

    asyncio.run(main())


@pytest.mark.parametrize("phase", ["start", "serve", "drain"])
@pytest.mark.parametrize(("kind", "status"), [(BadInput, UNUSABLE_STATUS), (BadRequest, 1)])
def test_failure_in_any_phase_is_reported_with_its_cause(
    run: RunDir, phase: str, kind: Callable[[str], RpcError], status: int
) -> None:
    async def main() -> None:
        async def fail() -> None:
            raise kind(f"cheese ran out in {phase}")

        seen: list[ServiceReport] = []
        async with reports(run, seen):
            service = Quiet(run, 0, run.endpoint("supervisor", 0))
            setattr(service, phase, fail)
            task = asyncio.create_task(service.run_until_stopped())
            if phase == "drain":
                await eventually(lambda: service.state == ProcessState.READY)
                service.request_stop()
            async with asyncio.timeout(DEADLINE_S):
                assert await task == status
        assert (seen[-1].state, seen[-1].cause) == ("FAILED", f"cheese ran out in {phase}")
        assert [report.cause for report in seen[:-1]] == [""] * (len(seen) - 1)
        assert not run.socket_file("quiet", 0).exists()

    asyncio.run(main())


def test_a_service_that_cannot_be_constructed_reports_why(run: RunDir) -> None:
    run.topology.write_text("run: [")

    async def main() -> None:
        seen: list[ServiceReport] = []
        async with reports(run, seen):
            supervised = ("--supervisor", run.endpoint("supervisor", 0), "--parent", str(os.getpid()))
            command = (sys.executable, "-m", "services.batch_store", "--run", str(run.path), *supervised)
            process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
            async with asyncio.timeout(START_S):
                assert await process.wait() == UNUSABLE_STATUS
        assert [report.state for report in seen] == ["FAILED"]
        assert seen[0].cause.startswith(f"{run.topology}:1: not YAML: ")
        assert "\n" not in seen[0].cause

    asyncio.run(main())


def test_service_stopped_during_start_exits_with_success(run: RunDir) -> None:
    async def main() -> None:
        service = Quiet(run, 0)
        service.start = asyncio.Event().wait  # type: ignore[assignment,method-assign]
        async with living(service, ProcessState.STARTING) as task, asking(run.endpoint("quiet", 0)) as client:
            pong = await client.call(Ping(), Pong, deadline_s=DEADLINE_S)
            assert pong.state == "STARTING"  # The service answers while it starts.
        assert task.result() == 0

    asyncio.run(main())


def test_neither_a_missing_supervisor_nor_an_unclosed_socket_delays_the_exit_of_a_service(run: RunDir) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        service = Quiet(run, 0, run.endpoint("supervisor", 0))
        forgotten = service.context.socket(zmq.PUB)
        forgotten.bind("tcp://127.0.0.1:*")
        async with living(service):
            began = loop.time()
        assert loop.time() - began < 3.0
        assert forgotten.closed

    asyncio.run(main())


def test_restarted_supervisor_gets_the_states_it_missed(run: RunDir) -> None:
    async def main() -> None:
        seen: list[ServiceReport] = []
        service = Quiet(run, 0, run.endpoint("supervisor", 0))
        async with living(service), reports(run, seen):
            await eventually(lambda: len(seen) == 2)
        assert [report.state for report in seen] == ["STARTING", "READY"]

    asyncio.run(main())


class Beating(Service):
    NAME = "beating"
    lost: list[int]

    def on_leases_lost(self, lease_ids: list[int]) -> None:
        self.lost = lease_ids


def test_service_registers_sends_heartbeats_and_registers_again_with_a_restarted_scheduler(run: RunDir) -> None:
    async def main() -> None:
        registered: list[Register] = []
        beats: list[Heartbeat] = []
        life = 1

        def register(body: Register, _: Any) -> Registered:
            registered.append(body)
            return Registered(scheduler_incarnation=life, heartbeat_s=1.0)

        def beat(body: Heartbeat, _: Any) -> HeartbeatAck:
            beats.append(body)
            known = len(registered) == life
            return HeartbeatAck(scheduler_incarnation=life, registered=known, lost_leases=[5] if life == 2 else [])

        service = Beating(run, 0)
        scheduler = run.endpoint("scheduler", 0)
        async with living(service, ProcessState.READY):
            async with serving(scheduler, (Register, register), (Heartbeat, beat)):
                await eventually(lambda: beats)
            life = 2
            async with serving(scheduler, (Register, register), (Heartbeat, beat)):
                await eventually(lambda: len(registered) == 2)
                await eventually(lambda: getattr(service, "lost", None) == [5])
        assert {body.incarnation for body in registered} == {service.incarnation}
        assert registered[0].endpoint == run.endpoint("beating", 0)
        assert beats[0].rss_bytes > 1 << 20

    asyncio.run(main())


@pytest.mark.parametrize(("every_s", "least", "most"), [(0.01, 20, 1000), (3600.0, 1, 1)])
def test_heartbeats_are_sent_as_often_as_the_scheduler_asks_for(
    every_s: float, least: int, most: int, run: RunDir
) -> None:
    async def main() -> None:
        beats: list[Heartbeat] = []

        def beat(body: Heartbeat, _: Any) -> HeartbeatAck:
            beats.append(body)
            return HeartbeatAck(scheduler_incarnation=1, registered=True)

        answer = Registered(scheduler_incarnation=1, heartbeat_s=every_s)
        async with (
            serving(run.endpoint("scheduler", 0), (Register, lambda _, __: answer), (Heartbeat, beat)),
            living(Beating(run, 0)),
        ):
            await eventually(lambda: len(beats) >= least)
            await asyncio.sleep(1.5)  # This is longer than the interval in a small run.
        assert least <= len(beats) <= most

    asyncio.run(main())


def test_registration_that_is_refused_is_retried_slowly(run: RunDir) -> None:
    async def main() -> None:
        asked = 0

        def refuse(_: Register, __: Any) -> Registered:
            nonlocal asked
            asked += 1
            raise RpcError("not_ready", "later")

        async with serving(run.endpoint("scheduler", 0), (Register, refuse)), living(Beating(run, 0)):
            await eventually(lambda: asked)
            await asyncio.sleep(0.5)
        assert asked == 1

    asyncio.run(main())


def test_service_whose_heartbeat_raises_fails_and_reports_the_exception(run: RunDir) -> None:
    async def main() -> None:
        def broken() -> Heartbeat:
            raise KeyError("lease")

        seen: list[ServiceReport] = []
        answer = Registered(scheduler_incarnation=1, heartbeat_s=1.0)
        async with (
            reports(run, seen),
            serving(run.endpoint("scheduler", 0), (Register, lambda _, __: answer)),
        ):
            service = Beating(run, 0, run.endpoint("supervisor", 0))
            service.heartbeat = broken  # type: ignore[method-assign]
            async with asyncio.timeout(DEADLINE_S):
                assert await service.run_until_stopped() == 1
        assert (seen[-1].state, seen[-1].cause) == ("FAILED", "KeyError: 'lease'")

    asyncio.run(main())


def test_telemetry_too_large_for_a_message_is_dropped_and_counted(run: RunDir) -> None:
    async def main() -> None:
        sender = TelemetrySender("talkative", 0, 7)
        async with asking(run.endpoint("monitor", 0)) as client:
            sender.connect(client)
            sender.emit("reward", {"x" * (9 << 20): 1.0})
            sender.emit("reward", {"x": 1.0})
            sender.flush()
            assert sender.dropped == 1

    asyncio.run(main())


def test_telemetry_counts_its_drops_and_arrives_in_order(run: RunDir) -> None:
    async def main() -> None:
        seen: list[Telemetry] = []
        sender = TelemetrySender("quiet", 0, 7)
        sender.emit("service", {"state": "STARTING"})
        assert sender.dropped == 1  # The service is not connected to any monitor.
        endpoint = run.endpoint("monitor", 0)
        async with asking(endpoint) as client:
            sender.connect(client)
            for i in range(100):
                sender.emit("step", {"step": float(i)})
            sender.flush()
            lost = sender.dropped
            assert 0 < lost < 100
            async with serving(endpoint, (Telemetry, lambda body, _: seen.append(body) or Ack())):
                await eventually(lambda: len(seen) == 101 - lost)
                sender.emit("step", {"step": 100.0})
                await eventually(lambda: seen[-1].values == {"step": 100.0})
        assert seen[-1].dropped == lost
        assert seen[-1].sequence == 102
        assert [message.sequence for message in seen] == sorted(message.sequence for message in seen)

    asyncio.run(main())


def arguments(run: RunDir, *more: str) -> list[str]:
    return ["service", "--run", str(run.path), "--instance", "0", *more]


def test_sigterm_ends_a_process_with_success_and_leaves_no_file(run: RunDir) -> None:
    with process(*arguments(run)) as child:
        assert line_of(child).startswith("serving")
        assert run.socket_file("echo", 0).is_socket()
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == 0
        assert list(run.sockets.glob("echo*")) == []


def test_process_raises_its_descriptor_limit_to_the_maximum(run: RunDir) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))}
    with process(*arguments(run), **few) as child:
        line_of(child)
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_second_process_of_an_instance_exits_with_status_1_and_one_line_and_the_first_continues(run: RunDir) -> None:
    with process(*arguments(run)) as first:
        line_of(first)
        with process(*arguments(run)) as second:
            _, complaint = second.communicate(timeout=20)
            assert second.returncode == 1
            assert f"echo/0: {run.endpoint('echo', 0)} is in use by a live process" in complaint.splitlines()[-1]

        async def ask() -> int:
            async with asking(run.endpoint("echo", 0)) as client:
                return (await client.call(GetInventory(cursor=4), Inventory, deadline_s=DEADLINE_S)).cursor

        assert asyncio.run(ask()) == 8


def test_process_killed_with_sigkill_can_be_restarted_at_once(run: RunDir) -> None:
    with process(*arguments(run)) as first:
        line_of(first)
        first.kill()
        first.wait(DEADLINE_S)
    assert run.socket_file("echo", 0).exists()
    with process(*arguments(run)) as second:
        assert line_of(second) == f"serving {second.pid}"


def test_process_that_fails_prints_the_cause_and_exits_with_status_1(run: RunDir) -> None:
    with process(*arguments(run), env={"ECHO_FAIL": "no cheese"}) as child:
        _, complaint = child.communicate(timeout=20)
        assert child.returncode == 1
        assert complaint.splitlines()[-1] == "echo/0: ValueError: no cheese"
    assert list(run.sockets.glob("echo*")) == []


def test_process_with_a_wrong_run_directory_exits_with_status_2_and_one_line(tmp_path: Path) -> None:
    with process("service", "--run", str(tmp_path)) as child:
        _, complaint = child.communicate(timeout=20)
        assert child.returncode == 2
        assert complaint.startswith(f"services.echo: run directory {tmp_path}: not a run")
        assert complaint.count("\n") == 1


def test_supervised_process_exits_when_its_supervisor_is_killed(run: RunDir) -> None:
    supervised = arguments(run, "--supervisor", run.endpoint("supervisor", 0))[1:]
    with process("spawn", *supervised) as parent:
        service = psutil.Process(int(line_of(parent).split()[1]))
        parent.kill()
        parent.wait(DEADLINE_S)
        service.wait(DEADLINE_S)
    assert not run.socket_file("echo", 0).exists()


def test_service_on_a_thread_answers_like_one_in_a_separate_process(run: RunDir) -> None:
    async def main() -> None:
        other: list[Service] = []

        async def live() -> int:
            service = Echo(run, 0)
            other.append(service)
            return await service.run_until_stopped()

        running = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(live()))
        async with asking(run.endpoint("echo", 0)) as client:
            assert (await client.call(GetInventory(cursor=4), Inventory, deadline_s=DEADLINE_S)).cursor == 8
        other[0].loop.call_soon_threadsafe(other[0].request_stop)
        async with asyncio.timeout(DEADLINE_S):
            assert await running == 0

    asyncio.run(main())


def test_clients_are_cached_per_instance(run: RunDir) -> None:
    async def main() -> None:
        async with serving(run.endpoint("echo", 1), (GetInventory, double)):
            service = Quiet(run, 0)
            async with living(service):
                assert service.client("echo", 1) is service.client("echo", 1)
                assert service.client("echo", 1) is not service.client("echo", 0)
                answer = await service.client("echo", 1).call(GetInventory(cursor=1), Inventory, deadline_s=DEADLINE_S)
                assert answer.cursor == 2
                with pytest.raises(RpcError, match="echo/0"):
                    await service.client("echo", 0).call(GetInventory(), Inventory, deadline_s=0.1)

    asyncio.run(main())


def test_heartbeat_can_be_extended_by_a_service(run: RunDir) -> None:
    async def main() -> None:
        beat = msgspec.structs.replace(Beating(run, 0).heartbeat(), holds_step=4)
        assert (beat.service, beat.holds_step, beat.state) == ("beating", 4, "STARTING")

    asyncio.run(main())
