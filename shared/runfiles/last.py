"""The file `last.jsonl`: what was known about a run when it ended, as rows of the monitor's stream.

When the monitor ends, it writes the last value of every topic and the newest spans. When the run ends, the supervisor
adds the final states of the processes. A line is what `launch.monitor --json` prints for a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from proto.messages import TopicRow
from shared.runfiles.lines import FollowedFile

LAST = "last.jsonl"


def as_lines(rows: Iterable[TopicRow]) -> bytes:
    """Return the lines for some rows."""
    return b"".join(msgspec.json.encode(msgspec.structs.asdict(row)) + b"\n" for row in rows)


def new_rows(file: FollowedFile) -> Iterator[TopicRow]:
    """Yield the rows that were added to the file, or all rows if it was replaced. Damaged lines are skipped."""
    return (row for row in map(_parsed, file.new_lines()) if row is not None)


def _parsed(line: str) -> TopicRow | None:
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        return msgspec.convert([fields[name] for name in TopicRow.__struct_fields__], TopicRow)
    except (msgspec.DecodeError, KeyError):
        return None
