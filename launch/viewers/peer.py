"""Finds the run that a command names and sends one request to one of its services. Every wait has a deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from launch.viewers.ended import ended_text
from proto.ids import new_incarnation
from proto.messages import ErrorCode
from proto.registry import Message, Request
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rpc.transport import Pump, open_socket
from shared.rundir import RunDir, newest_run, service_name
from shared.security.access import Access, read
from shared.security.curve import unlock

R = TypeVar("R", bound=Message)
DEADLINE_S = 3.0
Run = RunDir | Access
"""A run on this machine, or a run on another machine described by an access file."""
RUNS = Path("runs")
EXIT_UNREACHABLE, EXIT_USAGE = 1, 2
_OTHER_KEY = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_OUTCOMES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _OTHER_KEY


def find(run: Path | None, access: Path | None) -> Run:
    """Return the run that the options name. Raises RpcError(bad_request)."""
    if access is None:
        return RunDir.open(run or newest_run(RUNS))
    if run is not None:
        raise RpcError(ErrorCode.BAD_REQUEST, "--run and --access name two runs; give one of them")
    return read(access)


def no_answer_text(run: Run) -> str:
    """Return one line about a run of which neither the scheduler nor the supervisor answers."""
    if isinstance(run, Access):
        return f"run {run.name}: neither scheduler nor supervisor answers; is it running?"
    return ended_text(run) or f"run {run.path}: neither scheduler nor supervisor answers; see {run.logs}"


async def with_client(run: Run, service: str, request: Request, reply: type[R], deadline_s: float = DEADLINE_S) -> R:
    """Return the reply of instance 0 of `service`, which must arrive within `deadline_s` seconds.

    Raises RpcError: `deadline` if the service does not answer, which says how the run ended if it has; `bad_request` if
    the service refuses this access.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        if isinstance(run, Access):
            where, endpoint = f"run {run.name}", run.endpoints[service]
            await verify_access(context, run, service)
        elif run.socket_file(service, 0).exists():
            where, endpoint = f"run {run.path}", run.endpoint(service, 0)
        else:
            raise RpcError(ErrorCode.DEADLINE, ended_text(run) or f"run {run.path}: no {service} is running")
        ring = run.keys if isinstance(run, Access) else None
        client = Client(context, endpoint, service_name(service, 0), new_incarnation(), keys=ring)
        try:
            return await client.call(request, reply, deadline_s=deadline_s)
        except DeadlineExceeded:
            over = ended_text(run) if isinstance(run, RunDir) else ""
            text = over or f"{where}: {service} does not answer within {deadline_s:g} s"
            raise RpcError(ErrorCode.DEADLINE, text) from None
        finally:
            client.close()
    finally:
        await asyncio.get_running_loop().run_in_executor(None, context.term)


async def answer_or_none(run: Run, service: str, request: Request, reply: type[R]) -> R | None:
    """Return the reply of instance 0 of `service`, or None if it does not answer.

    Raises RpcError(bad_request) if it refuses this access.
    """
    try:
        return await with_client(run, service, request, reply)
    except RpcError as error:
        if error.code == ErrorCode.BAD_REQUEST:
            raise
        return None


async def verify_access(context: zmq.Context[zmq.Socket[bytes]], access: Access, service: str) -> None:
    """Return once `service` admits this access.

    Raises RpcError: `bad_request` if it refuses the access or belongs to another run, `deadline` if nothing answers. A
    request alone could not distinguish these cases, because a peer that refuses and one that is absent both leave it
    unanswered.
    """
    endpoint = access.endpoints[service]
    outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_event(frames: list[bytes]) -> None:
        if not outcome.done():
            outcome.set_result(parse_monitor_message(frames)["event"])

    socket = open_socket(context, zmq.DEALER)
    unlock(socket, access.keys)
    events = Pump(socket.get_monitor_socket(_OUTCOMES), on_event)
    socket.connect(endpoint)
    where = f"run {access.name}: {service} at {endpoint}"
    try:
        event = await asyncio.wait_for(outcome, DEADLINE_S)
    except TimeoutError:
        raise RpcError(ErrorCode.DEADLINE, f"{where} cannot be reached; is the run up and the port open?") from None
    finally:
        events.close()
        socket.disable_monitor()
        socket.close()
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        text = f"{where} refused this access: the role {access.role.label} is not enough, or its key is not the run's"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"{where} did not prove that it belongs to this run; does this access file belong to another run?",
        )
