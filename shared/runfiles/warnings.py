"""The warnings of a run: the records of `warnings.jsonl`. Only the monitor appends to this file; all other code only
reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from shared.runfiles.lines import FollowedFile

TOPIC = "warning/"
"""Prefix of the topics under which the monitor publishes warnings. The rest is the kind."""


class WarningRecord(msgspec.Struct, frozen=True):
    """One warning. It is issued each time its condition begins."""

    at: float
    """Time of the warning, in seconds since 1970."""
    step: int
    """The newest committed step at that time."""
    kind: str
    """A `WarningKind`."""
    text: str
    """The observation, with numbers, in one line."""
    remedy: str
    """The advice, with the topology key to change, in one line."""
    about: str = ""
    """The service or the evaluation set that the warning is about. Empty if it is about the whole run."""


def line_of(record: WarningRecord) -> str:
    """Return the warning as one human-readable line."""
    return f"warning at step {record.step}: {record.text}; {record.remedy} ({record.kind})"


def parse(line: bytes | str) -> WarningRecord | None:
    """Return the record in a line, or None if the line is damaged."""
    try:
        return msgspec.json.decode(line, type=WarningRecord)
    except msgspec.DecodeError:
        return None


def new_warnings(file: FollowedFile) -> Iterator[WarningRecord]:
    """Yield the warnings that were added to a warnings file. Damaged lines are skipped."""
    return (record for record in map(parse, file.new_lines()) if record is not None)


def of_topic(values: Mapping[str, float | str]) -> WarningRecord | None:
    """Return the record that the values of the topic `warning/<kind>` hold, or None if they are not a record."""
    try:
        return msgspec.convert(values, WarningRecord, strict=False)
    except msgspec.ValidationError:
        return None


def read(path: Path) -> list[WarningRecord]:
    """Return all warnings in a file, oldest first. A missing file holds none."""
    return list(new_warnings(FollowedFile(path)))
