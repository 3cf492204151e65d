"""Messages used by all services: errors, acknowledgements and pings. This module imports no other message module."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from proto.registry import Message, Request, message

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
else:  # msgspec passes fields of exactly this class to the guarded msgpack-numpy hooks
    Array = np.ndarray


@message(1)
class Error(Message, frozen=True, kw_only=True):
    """An error. It may be the answer to any request."""

    code: str  # one of `ErrorCode`
    message: str  # one human-readable line
    retry_after_s: float = 0.0  # seconds after which to ask again; 0: the caller decides
    names: list[str] = []  # the first names that the error concerns; `message` ends with the number of others


class ErrorCode(StrEnum):
    """The closed list of `Error.code`."""

    BAD_REQUEST = "bad_request"  # the request can never succeed
    BAD_DATA = "bad_data"  # unusable numbers or shapes in tasks (`names`); nothing was changed
    BUSY = "busy"  # no room now; retry after retry_after_s
    NOT_READY = "not_ready"  # nothing became available before the deadline; ask again
    MISSING = "missing"  # shards that do not exist (`names`)
    GONE = "gone"  # the weights of a version no longer exist; sampling with it can never succeed
    COLLECTED = "collected"  # the task was collected: tombstoned and no longer readable
    CONFLICT = "conflict"  # same fence, different bytes; or a step, version or incarnation out of order
    LOST = "lost"  # the lease is no longer held, or the caller is not registered
    DEADLINE = "deadline"  # the handler did not finish in time
    DRAINING = "draining"  # the service is about to exit
    INTERNAL = "internal"  # a defect; the service's log has details


@message(2)
class Ack(Message, frozen=True, kw_only=True):
    """The request was carried out. There is nothing else to report."""


@message(3)
class Pong(Message, frozen=True, kw_only=True):
    """The mailbox is alive."""

    service: str
    instance: int
    incarnation: int
    state: str  # STARTING, READY, DRAINING, STOPPED or FAILED; for the supervisor, its phase (`SupervisorState`)
    at: float = 0.0  # time of the answer, in seconds since 1970; 0 if it is not known


@message(4, reply=Pong)
class Ping(Request, frozen=True, kw_only=True):
    """Ask whether the mailbox is alive. Any process may send this request to any other."""
