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
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from launch.checks import distribution, preflight
from launch.commands import place
from launch.commands.agent import RETRY_S, AgentEnds, introduce, live
from launch.placement.facts import facts
from launch.processes.plan import SUPERVISOR
from proto.messages import ErrorCode, HostFacts
from shared.actor import logging
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, release, sweep_abandoned
from shared.security import access as accesses
from shared.security.access import Access
from shared.topology import Topology, TopologyError, load

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

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


if __name__ == "__main__":
    app()
