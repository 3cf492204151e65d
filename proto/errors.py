"""The one exception a decoder raises, whatever the bytes were."""

from __future__ import annotations


class WireError(ValueError):
    """Bytes that are not a message of this protocol, or values that cannot become one.

    The message is one line that names the field, its value and the limit. Decoders raise nothing else.
    """
