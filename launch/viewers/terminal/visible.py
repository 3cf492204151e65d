"""Makes text from a run harmless: names, samples and log lines may contain codes that would control the terminal."""

from __future__ import annotations

from rich.text import Text

_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_HARMLESS = {
    **{code: 0x2400 + code for code in range(0x20) if code != 0x0A},
    0x09: 0x20,
    0x7F: 0x2421,
    **{code: 0xFFFD for code in range(0x80, 0xA0)},
    **{ord(character): 0xFFFD for character in _BIDI},
}
"""Control characters become their pictures, direction codes become �, and a tab becomes a space."""


def visible(text: str) -> str:
    """Return `text` with every control character replaced by a visible one. Line breaks are kept."""
    return text.translate(_HARMLESS)


def visible_text(text: Text) -> Text:
    """Apply `visible` to styled text, in place, and return the text."""
    text.plain = visible(text.plain)
    return text
