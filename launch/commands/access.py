"""Gives another machine access to a run, through an access file. The module itself opens no connection."""

from __future__ import annotations

from pathlib import Path

from launch.processes.plan import listen_endpoint
from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.security import access
from shared.security.access import ANNOUNCED, Access
from shared.security.keys import load as load_keys
from shared.security.roles import Role
from shared.topology import load


def export(run: RunDir, role: Role, file: Path) -> None:
    """Write an access file to `file`, with mode 0600, for a machine that connects to `run` as `role`.

    Raises RpcError(bad_request) if the run does not accept connections from other machines, or if the file cannot be
    written.
    """
    made = access_of(run, role)
    try:
        access.write(file, made)
    except OSError as error:
        raise RpcError(ErrorCode.BAD_REQUEST, f"{file}: {error.strerror}") from None


def access_of(run: RunDir, role: Role) -> Access:
    """Return the access that lets a machine connect to `run` as `role`.

    Raises RpcError(bad_request) if the run does not accept connections from other machines.
    """
    topology = load(run.topology)
    if topology.transport.listen is None:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"run {run.path}: answers only this machine; set transport.listen to an address that others can reach",
        )
    endpoints = {service: listen_endpoint(topology.transport, service) for service in ANNOUNCED}
    text = run.topology.read_text() if role == Role.SERVICE else ""
    return Access(run.name, load_keys(run.keys, role), endpoints, text)
