"""Makes sample text readable to people and harmless to a terminal, because a model can write anything."""

from __future__ import annotations

import unicodedata
from typing import Any

SHOWN_CHARACTERS = 4000
_KEPT = frozenset("\n\t")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories of control characters, invisible format characters (such as bidirectional overrides), lone
surrogates, private-use characters, and separators that break lines."""


def plain(text: str) -> str:
    """Return the text with every control and invisible character written as its escape, such as `\\x1b` and `\\u202e`.

    Newlines and tabs are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else _escaped(character) for character in text)


def conversation(prompt: str | list[dict[str, Any]]) -> str:
    """Return a raw prompt unchanged, or the messages of a conversation in order, each preceded by its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """Return a text, or its beginning followed by the number of characters left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def _is_harmless(character: str) -> bool:
    return character in _KEPT or unicodedata.category(character) not in _HIDDEN


def _escaped(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
