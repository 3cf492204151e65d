"""Bearer tokens of HTTP requests."""

from __future__ import annotations

import hashlib
import hmac


class Secret:
    """A token that is compared in constant time."""

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    def matches(self, given: str) -> bool:
        # All digests have the same length, so the comparison does not reveal the length of the token.
        return hmac.compare_digest(hashlib.sha256(given.encode()).digest(), self._digest)

    def is_borne_by(self, authorization: str) -> bool:
        """Return whether the header `authorization` is a bearer token that matches (RFC 6750)."""
        kind, _, given = authorization.partition(" ")
        return kind.lower() == "bearer" and self.matches(given)
