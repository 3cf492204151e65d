"""What a request can end with, besides its reply."""

from __future__ import annotations

from proto.messages import Error, ErrorCode


class RpcError(Exception):
    """The peer answered `Error`, or a handler wants to. `code` is one of `proto.messages.ErrorCode`."""

    def __init__(self, code: str, message: str, *, retry_after_s: float = 0.0, names: list[str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.names = names or []

    def to_message(self) -> Error:
        return Error(code=self.code, message=str(self), retry_after_s=self.retry_after_s, names=self.names[:64])


class DeadlineExceeded(RpcError):
    """No reply came in time. The request may or may not have been carried out; the same request may be sent again."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.DEADLINE, message)
