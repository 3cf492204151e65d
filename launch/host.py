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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import structlog
import typer

from launch.checks import distribution, preflight
from launch.commands import place
from launch.placement.facts import facts
from launch.placement.link import HostLink
from launch.spares.heavy import spare_kinds
from launch.supervisor.events import RunOutcome
from launch.supervisor.plan import SUPERVISOR
from launch.supervisor.server import Supervisor
from proto.ids import new_incarnation
from proto.messages import ErrorCode, HostFacts
from shared.actor import logging
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, release, sweep_abandoned
from shared.security import access as accesses
from shared.security.access import Access
from shared.topology import Topology, TopologyError, load

JOIN_S = 60.0
"""Maximum time, in seconds, that an agent keeps trying to join a run that does not answer, or that still has a record
of an earlier agent."""
RETRY_S = 1.0
EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
T = TypeVar("T")

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
        given = _from_input() if access == "-" else _from_file(Path(access), wait_s)
        host = name or socket.gethostname()
        path = (run_dir or place.BASE / given.name / "hosts" / host).absolute()
        status = _run(given, host, path, address, held=access == "-")
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
            lines = [str(each).removeprefix(f"{file}:").partition(": ")[2] for each in error.problems]
            raise RpcError(ErrorCode.BAD_REQUEST, "\n".join(lines)) from None


def _from_input() -> Access:
    line = sys.stdin.buffer.readline(accesses.FILE_LIMIT_BYTES)
    return accesses.decode(line)


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


def _run(access: Access, host: str, path: Path, address: str, *, held: bool) -> int:
    """Take part in the run until it ends, and return the exit status.

    `held` says whether the agent exits when its standard input ends. Raises RpcError(bad_request) with a line for each
    reason why this host cannot take part.
    """
    ends = _Ends(held)
    asyncio.run(_introduce(access, host, _checked(access.topology), ends))
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
            life = _Life(run, access, topology, host, address, lock, ends)
            status = asyncio.run(life.live())
        finally:
            release(hold)
            run.remove_volatile()
        if status is not None:
            return status
        print(f"host {host}: the run considers it lost; it joins again", file=sys.stderr)


async def _introduce(access: Access, host: str, there: HostFacts, ends: _Ends) -> None:
    """Have home decide whether this host can take part. Raises RpcError(bad_request) if it cannot."""
    link = HostLink(access, host, [], new_incarnation())
    try:
        await _answer_to(lambda: link.introduce(there), ends)
    finally:
        await link.close()


async def _answer_to(ask: Callable[[], Awaitable[T]], ends: _Ends) -> T:
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


class _Ends:
    """Makes the agent exit after a signal or at the end of its standard input, at any time after its start.

    The first signal drains the host, so that it returns its leases. A second signal or the end of the input kills the
    processes on the host.
    """

    def __init__(self, held: bool) -> None:
        self._supervisor: Supervisor | None = None
        self._loop: asyncio.AbstractEventLoop
        self._causes: list[str] = []
        self._killed = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda taken, _: self._ask(signal.Signals(taken).name))
        if held:
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


class _Life:
    """One period of this host's membership in the run."""

    def __init__(
        self, run: RunDir, access: Access, topology: Topology, host: str, address: str, lock: int, ends: _Ends
    ) -> None:
        self._run, self._access, self._topology = run, access, topology
        self._host, self._lock, self._ends = host, lock, ends
        self._listen = f"tcp://{address}:0"
        self._log = structlog.get_logger("host")

    async def live(self) -> int | None:
        """Join, run the processes that the run orders, and return the exit status, or None if the host must join
        again."""
        names = preflight.gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"))
        link = HostLink(self._access, self._host, names, new_incarnation())
        try:
            orders = await _answer_to(link.join, self._ends)
            keys = {(each.service, each.instance): each for each in orders.processes}
            supervisor = Supervisor(
                self._run,
                list(keys),
                threads={key: each.threads for key, each in keys.items()},
                start_limit_s=self._topology.run.start_limit_s,
                gpus={key: link.gpus_of(each) for key, each in keys.items()},
                listen=dict.fromkeys([*keys, (SUPERVISOR, 0)], self._listen),
                on_event=lambda event: None,
                lock=self._lock,
                spares=spare_kinds(self._topology, {service for service, _ in keys}),
                access=self._access,
            )
            running = asyncio.ensure_future(supervisor.run())
            await asyncio.sleep(0)  # lets the supervisor begin to listen first
            self._ends.apply_to(supervisor)
            following = asyncio.create_task(link.follow(supervisor))
            ended = await running
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            if link.given_up:
                return None
            failed = ended.cause if ended.outcome == RunOutcome.FAILED else ""
            await link.end(supervisor, failed)
            self._log.info("host ended", cause=ended.cause)
            if failed:
                print(f"host {self._host}: {failed}", file=sys.stderr)
            return EXIT_DONE if ended.cause == "the run ends" else EXIT_FAILED
        finally:
            await link.close()


if __name__ == "__main__":
    app()
