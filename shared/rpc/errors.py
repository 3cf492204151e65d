"""The errors with which a request can end."""

from __future__ import annotations

from proto.messages import Error, ErrorCode

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


class DeadlineExceeded(RpcError):
    """No reply arrived in time. The request may or may not have been carried out; it may be sent again."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.DEADLINE, message)
