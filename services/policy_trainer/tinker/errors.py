"""Errors with which a request of a client ends."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    """Who can mend a failed request."""

    USER = "user"
    SERVER = "server"


class BadRequest(ValueError):
    """A request is refused at once. `status` is that of the HTTP response; the message is one line that names the
    value, the limit and the remedy."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class NotThere(BadRequest):
    """A client names something that does not exist, or that belongs to another key. Both get the same answer."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 404)
