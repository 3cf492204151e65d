"""Names of files are bytes. Python shows those that are not UTF-8 as text that no message, page or JSON can hold.

A run cannot have such a name, and listings leave such names out.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST_WARNED = 256
"""Maximum number of names that are remembered, so that each is warned about only once."""
EVALUATION_PREFIX = "evaluate-"
"""Prefix of the names of runs that only evaluate."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def is_text(path: Path | str) -> bool:
    """Return whether a path is valid UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(path: Path | str) -> str:
    r"""Return a path for a message to a person, with the bytes that are not UTF-8 as `\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def number(name: str) -> int | None:
    """Return the number whose decimal digits are `name`, or None. Other files may have names such as 007, ² or ٣."""
    return int(name) if _NUMBER.fullmatch(name) else None


def listed(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths of a listing that are UTF-8. Each of the others is reported once, on standard error."""
    for path in paths:
        if is_text(path):
            yield path
        else:
            _warn(shown(path))


@functools.lru_cache(MOST_WARNED)
def _warn(path: str) -> None:
    logging.getLogger(__name__).warning("%s: left out, because its name is not UTF-8; rename it", path)
