"""Checks the values that a peer reports about itself, before they enter the run's status. The module is pure."""

from __future__ import annotations

import msgspec

from proto.messages import ErrorCode, Heartbeat, Register
from shared.rpc.errors import RpcError
from shared.rundir import service_name

MOST_TEXT = 1024
"""Maximum number of characters in each string that a service reports. The status of a run holds all of them."""
MOST = 1 << 50
"""Maximum bytes (one pebibyte) or shards of one store."""
MOST_TROUBLES = 16
"""Maximum number of problems in one heartbeat."""


def check_numbers(request: Register | Heartbeat) -> None:
    """Raise RpcError(bad_request) if a value is out of range. The error names the service and the value."""
    if isinstance(request, Register):
        numbers = {"limit_bytes": request.limit_bytes}
    else:
        numbers = {"store_bytes": request.store_bytes, "store_shards": request.store_shards}
    texts = [value for value in msgspec.structs.astuple(request) if isinstance(value, str)]
    if isinstance(request, Heartbeat):
        texts += [text for each in request.troubles[:MOST_TROUBLES] for text in (each.kind, each.text)]
    if not 0 <= request.instance < 1 << 31 or any(len(text) > MOST_TEXT for text in texts):
        who = f"{request.service[:64]}/{request.instance}"
        text = f"{who}: instances are counted from 0, and no text may have more than {MOST_TEXT} characters"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    if isinstance(request, Heartbeat) and len(request.troubles) > MOST_TROUBLES:
        text = f"{service_name(request.service, request.instance)}: {len(request.troubles)} troubles in one heartbeat"
        raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; at most {MOST_TROUBLES} are allowed")
    for name, value in numbers.items():
        if not 0 <= value <= MOST:
            who = service_name(request.service, request.instance)
            raise RpcError(ErrorCode.BAD_REQUEST, f"{who}: {name} {value} is out of range; it must be 0 to {MOST}")
