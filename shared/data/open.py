"""Opens a source by its name in the topology. A library is imported only for the kind of source that needs it.

- ``builtin:addition`` and ``builtin:addition?split=test``: two-digit additions, ``"47+85="`` -> ``"132"``.
- ``jsonl:/path/file.jsonl``: one JSON object per line; blank lines are skipped.
- ``parquet:/path/file.parquet``: the rows of a Parquet file (extra ``data``).
- ``datasets:/path/folder`` with an optional ``?split=name``: output of ``Dataset.save_to_disk`` (extra ``data``).
- ``reasoning-gym:dataset?size=1000&seed=0``: tasks of the library reasoning-gym (extra ``rewards``).

A relative path is relative to the working directory.
"""

from __future__ import annotations

from urllib.parse import parse_qsl

from shared.data.addition import AdditionSource
from shared.data.jsonl import JsonlSource
from shared.data.source import DataError, Source, nearest

FORMS = "builtin:<name>, jsonl:<path>, parquet:<path>, datasets:<folder> or reasoning-gym:<data set>"


def open_source(source: str, *, where: str) -> Source:
    """Open `source`. `where`, the file:line that names it, begins every error about the source itself.

    Raises DataError for an unknown kind, builtin or parameter, for a library that is not installed, and for a file
    that is missing or has no rows. A bad row is not an error here: see `Source.validate`.
    """
    kind, _, rest = source.partition(":")
    if kind == "builtin":
        name, _, query = rest.partition("?")
        if name != "addition":
            raise DataError(f"{where}: source {source!r} names no builtin{nearest(name, ['addition'])}")
        split = _split(source, query, where, default="train")
        if split not in ("train", "test"):
            raise DataError(f"{where}: source {source!r} has split {split!r}; the splits are train and test")
        return AdditionSource(split, name=source)
    if kind == "jsonl":
        return JsonlSource(rest, name=source, where=where)
    if kind == "parquet":
        from shared.data.tables import open_parquet

        return open_parquet(rest, name=source, where=where)
    if kind == "datasets":
        from shared.data.tables import open_saved_dataset

        folder, _, query = rest.partition("?")
        return open_saved_dataset(folder, _split(source, query, where, default=""), name=source, where=where)
    if kind == "reasoning-gym":
        from shared.data.gym_source import GymSource

        return GymSource(source, where=where)
    raise DataError(f"{where}: source {source!r} has an unknown kind; write {FORMS}")


def _split(source: str, query: str, where: str, *, default: str) -> str:
    """Return the value of `split`, the only parameter."""
    split = default
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key != "split":
            raise DataError(f"{where}: source {source!r} has unknown parameter {key!r}{nearest(key, ['split'])}")
        split = value
    return split
