"""Hands a run's access to another machine, and makes a host part of the run with it. Reaches nothing itself."""

from __future__ import annotations

from pathlib import Path

from launch.supervisor.plan import listen_endpoint
from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.security import access
from shared.security.access import ANNOUNCED, Access
from shared.security.keys import load as load_keys
from shared.security.roles import Role
from shared.topology import load


def role_of(label: str) -> Role:
    """Raises RpcError(bad_request) for a text that is no role."""
    try:
        return Role.of_label(label)
    except ValueError as error:
        raise RpcError(ErrorCode.BAD_REQUEST, str(error)) from None


def export(run: RunDir, role: Role, file: Path) -> None:
    """Write what a machine needs to reach `run` as `role` into `file`, mode 0600.

    Raises RpcError(bad_request) when the run answers no other machine, or the file cannot be written.
    """
    topology = load(run.topology, check_supported=False)
    if topology.transport.listen is None:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"run {run.path}: answers this machine only; set transport.listen to an address that others reach",
        )
    endpoints = {service: listen_endpoint(topology.transport, service) for service in ANNOUNCED}
    text = run.topology.read_text() if role == Role.SERVICE else ""
    try:
        access.write(file, Access(run.name, load_keys(run.keys, role), endpoints, text))
    except OSError as error:
        raise RpcError(ErrorCode.BAD_REQUEST, f"{file}: {error.strerror}") from None


def join(file: Path, folder: Path) -> RunDir:
    """Make `folder` this host's directory of the run that `file` leads to. Raises RpcError(bad_request)."""
    return RunDir.join(folder, access.read(file))
