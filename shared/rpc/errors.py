"""What a request can end with, besides its reply."""

from __future__ import annotations

from proto.messages import Error, ErrorCode

AWAY = (ErrorCode.DEADLINE, ErrorCode.BUSY, ErrorCode.DRAINING, ErrorCode.NOT_READY)
"""Answers after which the same call may succeed: the peer restarts, cannot be reached now, or has no room yet."""
MAX_NAMES = 64
"""So many names an answer carries; its message says how many more there are."""


class RpcError(Exception):
    """The peer answered `Error`, or a handler wants to. `code` is one of `proto.messages.ErrorCode`."""

    def __init__(self, code: str, message: str, *, retry_after_s: float = 0.0, names: list[str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.names = names or []

    def to_message(self) -> Error:
        """As it travels: with the first `MAX_NAMES` names."""
        left = len(self.names) - MAX_NAMES
        text = f"{self} (and {left} more than are named)" if left > 0 else str(self)
        return Error(code=self.code, message=text, retry_after_s=self.retry_after_s, names=self.names[:MAX_NAMES])


class DeadlineExceeded(RpcError):
    """No reply came in time. The request may or may not have been carried out; the same request may be sent again."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.DEADLINE, message)
