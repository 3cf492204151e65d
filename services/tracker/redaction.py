"""Prepares the resolved topology for files that leave the machine: hides its secrets and, if required, flattens it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
"""Matches the words of a name, however it separates them: `api_key`, `api-key`, `apiKey`, `APIKey`."""
_SECRET_WORDS = frozenset(
    {
        *("auth", "authorization", "bearer", "cookie", "cookies", "credential", "credentials", "passphrase", "passwd"),
        *("password", "passwords", "pwd", "secret", "secrets", "apikey", "apikeys", "authtoken", "accesstoken"),
    }
)
"""Words that make a name that of a secret wherever they stand in it."""
_LAST_WORDS = frozenset({"key", "keys", "token", "pass", "pat", "signature", "sig", "dsn"})
"""Words that make a name that of a secret if they are its last: `api_key`, but not `key_of_rows` or `token_mean`."""
_VALUES = re.compile(
    r"\b(?:sk|pk|rk)-[\w-]{16,}"  # OpenAI, Anthropic, OpenRouter, Stripe
    r"|\b(?:hf|ghp|gho|ghs|ghu|glpat|github_pat|xox[abp]|tvly|gsk|r8|pypi|dop_v1|shpat|sk_live|sk_test)[-_][\w-]{16,}"
    r"|\bA(?:KIA|SIA)[0-9A-Z]{16}\b"  # AWS
    r"|\bAIza[\w-]{30,}"  # Google
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
"""Matches texts that look like keys, under whatever name."""
_HEADER = re.compile(r"(\b(?:authorization|cookie|x-api-key)\b[\"']?\s*[:=]\s*[\"']?)[^\n\"']+", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_PAIR = re.compile(r"([\w.-]+)(\s*=\s*|:\s+)(\"[^\"]*\"|'[^']*'|[^\s&,;\"']+)")
"""Matches a name and its value within a text, such as a URL's query, a header or a command line."""


def is_secret(name: str) -> bool:
    """Return whether a key's name, in any case and with any separators, sounds like that of a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and (words[-1] in _LAST_WORDS or not _SECRET_WORDS.isdisjoint(words))


def without_secrets(value: Any, key: str = "") -> Any:
    """Return `value` with text under keys that sound secret, texts that look like keys, and credentials within texts
    replaced by `(hidden)`.

    Numbers, such as `max_new_tokens`, are kept.
    """
    secret = is_secret(key)
    if isinstance(value, Mapping):
        return {str(name): without_secrets(item, key if secret else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if secret and value else _within(value)


def _within(text: str) -> str:
    text = _HEADER.sub(rf"\1{HIDDEN}", _VALUES.sub(HIDDEN, _IN_URL.sub(HIDDEN, text)))
    return _PAIR.sub(lambda pair: f"{pair[1]}{pair[2]}{HIDDEN}" if is_secret(pair[1]) else pair[0], text)


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
