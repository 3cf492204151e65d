"""What everyone on the bus says: errors, acknowledgements, pings. It must never know another subject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from proto.registry import Message, Request, message

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
else:  # msgspec hands fields of this very class to the guarded msgpack-numpy hooks
    Array = np.ndarray


@message(1)
class Error(Message, frozen=True, kw_only=True):
    """The other possible answer to any request. `code` is one of `ErrorCode`; `message` is one line for a person."""

    code: str
    message: str
    retry_after_s: float = 0.0
    names: list[str] = []
    """What the error is about (missing shards, a lost lease): the first 64; `message` says how many more."""


class ErrorCode:
    """The closed list of `Error.code`."""

    BAD_REQUEST = "bad_request"  # the request can never succeed
    BAD_DATA = "bad_data"  # numbers or shapes of tasks (`names`) that cannot be computed with; nothing was changed
    BUSY = "busy"  # no room now; try again after retry_after_s
    NOT_READY = "not_ready"  # nothing to give before the deadline; ask again
    MISSING = "missing"  # shards that are not there (`names`)
    COLLECTED = "collected"  # the task was collected: tombstoned, never readable again
    CONFLICT = "conflict"  # same fence, other bytes; or a step, version or incarnation out of order
    LOST = "lost"  # the lease is no longer held, or the caller is not registered
    DEADLINE = "deadline"  # the handler did not finish in time
    DRAINING = "draining"  # the service is going away
    INTERNAL = "internal"  # a defect: see the service's log


@message(2)
class Ack(Message, frozen=True, kw_only=True):
    """Done, nothing to add."""


@message(3)
class Pong(Message, frozen=True, kw_only=True):
    """Answer to `Ping`."""

    service: str
    instance: int
    incarnation: int
    state: str


@message(4)
class Ping(Request, frozen=True, kw_only=True):
    """Is the mailbox alive? Anyone to anyone."""

    REPLY: ClassVar[type[Message]] = Pong
