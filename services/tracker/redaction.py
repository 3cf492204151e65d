"""Prepares the resolved topology for files that leave the machine: hides its secrets and, if required, flattens it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(^|[_.-])(key|keys|api_?key|token|secret|password|passwd|passphrase|credentials?|auth|authorization)$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_IN_QUERY = re.compile(r"([?&][\w.-]*(?:key|token|secret|password|auth|signature)=)[^&\s]+", re.IGNORECASE)


def without_secrets(value: Any, key: str = "") -> Any:
    """Return `value` with text under keys that sound secret, and credentials in URLs, replaced by `(hidden)`.

    Numbers, such as `max_new_tokens`, are kept.
    """
    if isinstance(value, Mapping):
        secret = bool(_SECRET.search(key))
        return {str(name): without_secrets(item, key if secret else str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if _SECRET.search(key):
        return HIDDEN
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_URL.sub(HIDDEN, value))


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the leaves of nested data as text, by dotted path. Unset values are omitted."""
    if isinstance(value, Mapping):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {} if value is None else {prefix: str(value)}
    leaves: dict[str, str] = {}
    for name, item in items:
        leaves |= flat(item, f"{prefix}.{name}" if prefix else name)
    return leaves
