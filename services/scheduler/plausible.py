"""Numbers that a peer says of itself, checked before they are added up: one that no machine has must not spoil the
status of the whole run. Pure.
"""

from __future__ import annotations

from proto.messages import ErrorCode, Heartbeat, Register
from shared.rpc.errors import RpcError
from shared.rundir import service_name

MOST = 1 << 50
"""Bytes (a pebibyte) or shards of one store."""


def check_numbers(request: Register | Heartbeat) -> None:
    """Raises RpcError(bad_request) that names the number."""
    if isinstance(request, Register):
        numbers = {"limit_bytes": request.limit_bytes}
    else:
        numbers = {"store_bytes": request.store_bytes, "store_shards": request.store_shards}
    for name, value in numbers.items():
        if not 0 <= value <= MOST:
            who = service_name(request.service, request.instance)
            raise RpcError(ErrorCode.BAD_REQUEST, f"{who}: {name} {value} is out of range, 0 to {MOST} are taken")
