"""`python -m launch.host --access FILE` runs the part of a run that belongs on this host.

It joins the run that the access file describes (`launch.ctl export-access --role service`). With its own supervisor and
guard, it runs what the run's supervisor orders: a store, rollouts, references and ranks of the trainer. It exits when
the run ends or no longer answers. An agent that the run considers lost joins again. Exit status: 0 if the run ended, 1
if the host failed or lost the run, 2 if the command line or the access is wrong.

The program that starts it (Ray, srun, ssh, a container) may pass the access on standard input instead (`--access -`):
one line, after which the input stays open. When the input ends, the agent exits. With `--wait` the file may be written
later, so that a job can start agents together with the run (`launch.cluster --export-access`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import structlog
import typer
import zmq

from launch.checks import distribution, preflight
from launch.commands import place
from launch.placement.facts import clock_ahead, facts
from launch.processes.plan import SUPERVISOR, Key, Resources, own_gpus
from launch.spares.processes import spare_kinds
from launch.supervisor.events import RunOutcome
from launch.supervisor.server import Supervisor
from launch.utf8 import ensure_utf8
from proto.ids import new_incarnation
from proto.messages import Ack, ErrorCode, HostCheck, HostFacts, HostOrders, HostReport, Ping, Pong
from shared.actor import logging
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, release, service_name, sweep_abandoned
from shared.security import access as accesses
from shared.security.access import Access
from shared.topology import Topology, TopologyError, load

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
JOIN_S = 60.0
"""Maximum time, in seconds, that an agent keeps trying to join a run that does not answer, or that still has a record
of an earlier agent."""
RETRY_S = 1.0
T = TypeVar("T")
RUN_ENDS = "the run ends"
REPORT_S = 1.0
CALL_S = 5.0
LAST_CALL_S = 2.0
ALONE_S = 60.0
"""Seconds without an answer from the run after which an agent kills everything on its host."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    access: Annotated[
        str, typer.Option("--access", metavar="FILE", help="access file with the role service, or - for standard input")
    ] = "",
    wait_s: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="maximum time to wait for FILE to be written"),
    ] = 0.0,
    name: Annotated[
        str, typer.Option("--name", help="the host's name in placement.hosts (default: its host name)")
    ] = "",
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="directory of this host (default: runs/<run>/hosts/<name>)")
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            "--address",
            help="address at which other hosts reach this one (default: placement.hosts.NAME.address, or that of the "
            "route to the run)",
        ),
    ] = "",
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="print, as JSON, what this host has, and what it lacks for the topology on standard input"
        ),
    ] = False,
) -> None:
    """Run the part of a run that belongs on this host."""
    if check:
        print(msgspec.json.encode(msgspec.structs.asdict(_checked(sys.stdin.read()))).decode())
        return
    path = Path()
    try:
        if not access:
            raise RpcError(ErrorCode.BAD_REQUEST, "--access: missing; name the file from `launch.ctl export-access`")
        if access == "-":
            given = accesses.decode(sys.stdin.buffer.readline(accesses.FILE_LIMIT_BYTES))
        else:
            given = _from_file(Path(access), wait_s)
        host = name or socket.gethostname()
        path = (run_dir or place.BASE / given.name / "hosts" / host).absolute()
        status = _run(given, host, path, address, with_input=access == "-")
    except RpcError as error:
        print("\n".join(f"launch.host: {line}" for line in str(error).splitlines()), file=sys.stderr)
        raise typer.Exit(EXIT_USAGE if error.code == ErrorCode.BAD_REQUEST else EXIT_FAILED) from None
    except OSError as error:
        print(f"launch.host: {path}: {error.strerror or error}; name another folder with --run-dir", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    raise typer.Exit(status)


def address_towards(endpoint: str) -> str:
    """Return the address of this host on its route to `endpoint`. Raises RpcError(bad_request) if there is no route."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        text = f"{endpoint}: cannot be reached from this host ({error.strerror}); check the network, or give --address"
        raise RpcError(ErrorCode.BAD_REQUEST, text) from None


def _checked(text: str) -> HostFacts:
    """Return the facts about this host, with the requirements of the topology `text` that it does not meet."""
    try:
        topology = _topology(text, check_files=False)
        return facts(preflight.check_host(topology if topology.policy.distribute else _topology(text)))
    except RpcError as error:
        return facts(str(error).splitlines())


def _topology(text: str, *, check_files: bool = True) -> Topology:
    """Read a resolved topology. Raises RpcError(bad_request) with a line for everything that this host lacks.

    Without `check_files`, the model and the data may be missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "topology.yaml"
        file.write_text(text)
        try:
            return load(file, check_files=check_files)
        except TopologyError as error:
            lines = [str(problem).removeprefix(f"{file}:").partition(": ")[2] for problem in error.problems]
            raise RpcError(ErrorCode.BAD_REQUEST, "\n".join(lines)) from None


def _from_file(path: Path, wait_s: float) -> Access:
    """Return the access in the file `path`, after waiting up to `wait_s` seconds for the file to be written.

    Raises RpcError: not_ready if the file is not written in time.
    """
    until = time.monotonic() + wait_s
    while wait_s and not path.exists():
        if time.monotonic() >= until:
            text = f"{path}: not written within {wait_s:g} s; is its launch.cluster --export-access running?"
            raise RpcError(ErrorCode.NOT_READY, text)
        time.sleep(min(RETRY_S, wait_s))
    return accesses.read(path)


def _run(access: Access, host: str, path: Path, address: str, *, with_input: bool) -> int:
    """Take part in the run until it ends, and return the exit status.

    `with_input` says whether the agent exits when its standard input ends. Raises RpcError(bad_request) with a line
    for each reason why this host cannot take part.
    """
    ends = AgentEnds(with_input)
    asyncio.run(introduce(access, host, _checked(access.topology), ends))
    topology = _topology(access.topology, check_files=False)
    there = topology.placement.hosts.get(host)
    address = address or (there and there.address) or address_towards(access.endpoints[SUPERVISOR])
    lock = place.lock(path)
    if topology.policy.distribute:
        access = asyncio.run(distribution.take(access, path / "files", host, lambda: ends.asked))
    topology = _topology(access.topology)
    root = preflight.shm_root(topology)
    while True:
        sweep_abandoned(root)
        run = RunDir.rejoin(path, access, shm_root=root)
        hold = run.hold()
        try:
            logging.configure(run.log_file(SUPERVISOR, 0), service=SUPERVISOR, instance=0, run=access.name, host=host)
            ended = asyncio.run(live(run, access, topology, host, address, lock, ends))
        finally:
            release(hold)
            run.remove_volatile()
        if ended is not None:
            return EXIT_DONE if ended else EXIT_FAILED
        print(f"host {host}: the run considers it lost; it joins again", file=sys.stderr)


class HostLink:
    """The connection from a host's agent to the run's supervisor, for one incarnation of the agent."""

    def __init__(self, access: Access, host: str, names: Sequence[str] = (), listen: str = "") -> None:
        """`names` are the GPUs that the agent may use, as CUDA_VISIBLE_DEVICES names them. `listen` is the endpoint at
        which its processes answer other hosts.
        """
        incarnation = new_incarnation()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        endpoint = access.endpoints[SUPERVISOR]
        self._client = Client(self._context, endpoint, f"{SUPERVISOR} at {endpoint}", incarnation, keys=access.keys)
        self._names = list(names)
        self._listen = listen
        self._report = HostReport(host=host, incarnation=incarnation, endpoint="", gpus=len(self._names), processes=[])
        self._ordered: set[Key] = set()
        self._log = structlog.get_logger("host")
        self.given_up = False
        """Whether the run considers this incarnation of the agent lost, so that the agent must join again under a new
        one."""

    async def introduce(self, there: HostFacts) -> None:
        """Ask home whether a host with the facts `there` can take part. Raises RpcError(bad_request) if it cannot."""
        sent_at = time.time()
        home = await self._client.call(Ping(), Pong, deadline_s=CALL_S)
        there = msgspec.structs.replace(there, clock_s=-clock_ahead(sent_at, home.at, time.time()))
        await self._client.call(HostCheck(host=self._report.host, facts=there), Ack, deadline_s=CALL_S)

    async def join(self) -> dict[Key, Resources]:
        """Report for the first time, and return the processes to run. Raises RpcError."""
        ordered = self._wanted(await self._client.call(self._report, HostOrders, deadline_s=CALL_S))
        self._ordered = set(ordered)
        return ordered

    def _wanted(self, orders: HostOrders) -> dict[Key, Resources]:
        return {
            (row.service, row.instance): Resources(
                row.threads, ",".join(self._names[gpu] for gpu in row.gpus), self._listen
            )
            for row in orders.processes
        }

    async def follow(self, supervisor: Supervisor) -> None:
        """Report and carry out the orders until cancelled."""
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while True:
            await asyncio.sleep(REPORT_S)
            try:
                orders = await self._send(supervisor, CALL_S)
            except RpcError as error:
                if error.code == ErrorCode.LOST:
                    self.given_up = True
                    supervisor.kill(str(error))
                elif error.code == ErrorCode.BAD_REQUEST:
                    supervisor.kill(str(error))
                elif loop.time() - heard_at > ALONE_S:
                    supervisor.kill(f"the run has not answered for {ALONE_S:g} s: {error}")
                continue
            heard_at = loop.time()
            self._obey(supervisor, orders)

    async def end(self, supervisor: Supervisor, failed: str) -> None:
        """Tell the run that everything on this host has ended. `failed` is the cause of a failure, or empty."""
        try:
            if failed:
                await self._send(supervisor, LAST_CALL_S, failed=failed)
            await self._send(supervisor, LAST_CALL_S, ended=True)
        except RpcError as error:
            self._log.warning("the run was not told that this host has ended", error=str(error))

    async def close(self) -> None:
        self._client.close()
        await asyncio.to_thread(self._context.term)

    async def _send(
        self, supervisor: Supervisor, deadline_s: float, *, failed: str = "", ended: bool = False
    ) -> HostOrders:
        report = msgspec.structs.replace(
            self._report,
            endpoint=supervisor.sockets.door,
            processes=supervisor.views.rows(),
            ended=ended,
            failed=failed,
        )
        return await self._client.call(report, HostOrders, deadline_s=deadline_s)

    def _obey(self, supervisor: Supervisor, orders: HostOrders) -> None:
        if orders.ends:
            supervisor.stop(RUN_ENDS)
            return
        wanted = self._wanted(orders)
        for key in wanted.keys() - self._ordered:
            self._log.info("ordered", service=key[0], instance=key[1])
            supervisor.add(key, wanted[key])
            print(f"host {self._report.host}: also runs {service_name(*key)}", flush=True)
        gone = self._ordered - wanted.keys()
        if gone:
            supervisor.drain(sorted(gone))
        self._ordered = set(wanted)


async def answer_to(ask: Callable[[], Awaitable[T]], ends: AgentEnds) -> T:
    """Repeat a request to home for up to JOIN_S seconds, and return the answer. Raises its last RpcError."""
    until = time.monotonic() + JOIN_S
    while True:
        try:
            return await ask()
        except RpcError as error:
            if error.code == ErrorCode.BAD_REQUEST or time.monotonic() >= until or ends.asked:
                raise
            structlog.get_logger("host").warning("not joined yet", error=str(error))
            await asyncio.sleep(RETRY_S)


async def introduce(access: Access, host: str, there: HostFacts, ends: AgentEnds) -> None:
    """Have home decide whether this host can take part. Raises RpcError(bad_request) if it cannot."""
    link = HostLink(access, host)
    try:
        await answer_to(lambda: link.introduce(there), ends)
    finally:
        await link.close()


class AgentEnds:
    """Makes the agent exit after a signal or at the end of its standard input, at any time after its start.

    The first signal drains the host, so that it returns its leases. A second signal or the end of the input kills the
    processes on the host.
    """

    def __init__(self, with_input: bool) -> None:
        self._supervisor: Supervisor | None = None
        self._loop: asyncio.AbstractEventLoop
        self._causes: list[str] = []
        self._killed = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda taken, _: self._ask(signal.Signals(taken).name))
        if with_input:
            threading.Thread(target=self._watch, name="standard input", daemon=True).start()

    @property
    def asked(self) -> bool:
        """Whether the agent has been asked to exit."""
        return bool(self._causes)

    def apply_to(self, supervisor: Supervisor) -> None:
        """Stop `supervisor` as soon as there is a reason for the agent to exit; there may be one already.

        Called on the supervisor's event loop.
        """
        self._loop = asyncio.get_running_loop()
        self._supervisor = supervisor
        self._act()

    def _watch(self) -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        self._killed = True
        self._ask("the end of standard input")

    def _ask(self, cause: str) -> None:
        self._causes.append(cause)
        if self._supervisor is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._act)

    def _act(self) -> None:
        if self._supervisor is None or not self._causes:
            return
        if self._killed or len(self._causes) > 1:
            self._supervisor.kill(self._causes[-1])
        else:
            self._supervisor.stop(self._causes[0])


def described(ordered: Iterable[Key]) -> str:
    """Return the processes in words, such as `batch-store/1, rollout/0`."""
    return ", ".join(sorted(service_name(*key) for key in ordered)) or "nothing yet"


async def live(
    run: RunDir, access: Access, topology: Topology, host: str, address: str, lock: int, ends: AgentEnds
) -> bool | None:
    """Take part in the run as `host`, which other hosts reach at `address`.

    Return whether the run has ended, or None if the host must join again.
    """
    listen = f"tcp://{address}:0"
    link = HostLink(access, host, own_gpus(), listen)
    try:
        ordered = await answer_to(link.join, ends)
        print(f"host {host}: joined {access.name}, runs {described(ordered)}; logs in {run.path / 'logs'}", flush=True)
        supervisor = Supervisor(
            run,
            ordered,
            start_limit_s=topology.run.start_limit_s,
            on_event=lambda event: None,
            listen=listen,
            lock=lock,
            spares=spare_kinds(topology, {service for service, _ in ordered}),
            access=access,
        )
        running = asyncio.ensure_future(supervisor.run())
        await asyncio.sleep(0)  # lets the supervisor begin to listen first
        ends.apply_to(supervisor)
        following = asyncio.create_task(link.follow(supervisor))
        ended = await running
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        if link.given_up:
            return None
        failed = ended.cause if ended.outcome == RunOutcome.FAILED else ""
        await link.end(supervisor, failed)
        structlog.get_logger("host").info("host ended", cause=ended.cause)
        if failed:
            print(f"host {host}: {failed}", file=sys.stderr)
        else:
            print(f"host {host}: ended ({ended.cause})", flush=True)
        return ended.cause == RUN_ENDS
    finally:
        await link.close()


if __name__ == "__main__":
    ensure_utf8()
    app()
