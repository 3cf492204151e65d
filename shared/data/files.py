"""Parses the part of a source that names files, `<path>?<key>=<value>&...`. The file name may be a pattern."""

from __future__ import annotations

import re
from pathlib import Path

_PARAMETERS = re.compile(r"(?P<path>.+?)\?(?P<query>\w+=[^/?]*)", re.DOTALL)


def split_parameters(rest: str) -> tuple[str, str]:
    """Return the path and the query from `rest`, the text that follows the kind of a source. The query may be empty."""
    match = _PARAMETERS.fullmatch(rest)
    return (match["path"], match["query"]) if match else (rest, "")


def matching_files(path: str) -> list[Path]:
    """Return the file at `path`, or all files that match, ordered by name, if the last part of the path contains a
    `*`."""
    file = Path(path)
    return sorted(file.parent.glob(file.name)) if "*" in file.name else [file]
