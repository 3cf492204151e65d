"""The exception that encoders and decoders raise."""

from __future__ import annotations


class WireError(ValueError):
    """Bytes that are not a message of this protocol, or values that cannot be encoded as one.

    The error message is one line that names the field, its value and the limit. Decoders raise no other exception.
    """
