"""The errors with which a request can end."""

from __future__ import annotations

from collections.abc import Iterator

from proto.messages import Error, ErrorCode
from shared.unusable import Unusable

AWAY = (ErrorCode.DEADLINE, ErrorCode.BUSY, ErrorCode.DRAINING, ErrorCode.NOT_READY)
"""Codes after which the same call may succeed: the peer is restarting, unreachable at the moment, or has no room."""
MAX_NAMES = 64
"""Maximum number of names in an error message. The text says how many more there are."""


class RpcError(Exception):
    """An `Error` that a peer sent as its reply, or with which a handler replies.

    `code` is one of `proto.messages.ErrorCode`.
    """

    def __init__(self, code: str, message: str, *, retry_after_s: float = 0.0, names: list[str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.names = names or []

    def to_message(self) -> Error:
        """Return the message to send, with the first `MAX_NAMES` names."""
        left = len(self.names) - MAX_NAMES
        text = f"{self} (and {left} more that are not named)" if left > 0 else str(self)
        return Error(code=self.code, message=text, retry_after_s=self.retry_after_s, names=self.names[:MAX_NAMES])


class BadInput(RpcError, Unusable):
    """An input of the run cannot be used.

    A service that raises this error while it starts or works ends the run instead of being restarted, if `is_certain`.
    A peer's `bad_request` arrives as a plain RpcError, so no service ends the run because of another's input.
    """

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.BAD_REQUEST, message)


_PASSING_ERRORS = (MemoryError, TimeoutError, ConnectionError, RuntimeError)
"""Exceptions that the same input may not raise again. RuntimeError includes torch's errors about memory and devices."""
_LASTING_OS_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_RUST_OS_ERROR = "(os error "
"""How libraries written in Rust (safetensors, tokenizers) end the text of an error that has an errno."""


def is_certain(error: BaseException) -> bool:
    """Return whether the same input is certain to raise `error` again.

    This is so for an Unusable, unless an exception in its chain shows that memory, a disk, a device, the network or a
    deadline may be to blame. The whole chain counts, because a library may hide such a cause behind an error of its
    own.
    """
    return isinstance(error, Unusable) and not any(map(_may_pass, _causes(error)))


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, _LASTING_OS_ERRORS):
        return True
    return isinstance(error, _PASSING_ERRORS) or _RUST_OS_ERROR in str(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions from which, or while handling which, `error` was raised."""
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause


class DeadlineExceeded(RpcError):
    """No reply arrived in time. The request may or may not have been carried out; it may be sent again."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.DEADLINE, message)
