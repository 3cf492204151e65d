"""Opens a source by its name in the topology. A library is imported only for the kind of source that needs it.

- ``builtin:addition`` and ``builtin:addition?split=test``: two-digit additions, ``"47+85="`` -> ``"132"``.
- ``jsonl:/path/file.jsonl``: one JSON object per line; blank lines are skipped.
- ``parquet:/path/file.parquet``: the rows of a Parquet file (extra ``data``).
- ``datasets:/path/folder`` with an optional ``?split=name``: output of ``Dataset.save_to_disk`` (extra ``data``).
- ``hub:owner/name/path``: files in a data set on the Hugging Face hub, which `shared.topology.hub` turns into one of
  the file sources above.
- ``reasoning-gym:dataset?size=1000&seed=0``: tasks from the reasoning-gym library (extra ``rewards``).

A relative path is relative to the working directory. In the name of a JSONL or Parquet file, ``*`` matches any
characters: the source then consists of the rows of all matching files, in order of file name. ``?prompt=question``
after a path uses the field ``question`` as the prompt.
"""

from __future__ import annotations

from urllib.parse import parse_qsl

from shared.data.addition import AdditionSource
from shared.data.files import matching_files, split_parameters
from shared.data.joined import JoinedSource
from shared.data.jsonl import JsonlSource
from shared.data.source import DataError, Source, nearest

FORMS = (
    "builtin:<name>, jsonl:<path>, parquet:<path>, datasets:<folder>, hub:<owner>/<name>/<path> or "
    "reasoning-gym:<data set>"
)


def open_source(source: str, *, where: str) -> Source:
    """Open `source`. Every error about the source itself begins with `where`, the file:line that names the source.

    Raises DataError for an unknown kind, builtin or parameter, for a library that is not installed, and for a file
    that is missing or has no rows. A bad row is not an error here: see `Source.validate`.
    """
    kind, _, rest = source.partition(":")
    if kind == "builtin":
        name, _, query = rest.partition("?")
        if name != "addition":
            raise DataError(f"{where}: source {source!r} names no builtin{nearest(name, ['addition'])}")
        split = _parameters(source, query, where, ("split",)).get("split", "train")
        if split not in ("train", "test"):
            raise DataError(f"{where}: source {source!r} has split {split!r}; the splits are train and test")
        return AdditionSource(split, name=source)
    if kind in ("jsonl", "parquet", "datasets"):
        path, query = split_parameters(rest)
        valid = ("prompt", "split") if kind == "datasets" else ("prompt",)
        given = _parameters(source, query, where, valid)
        prompt = given.get("prompt", "prompt")
        if kind == "datasets":
            from shared.data.tables import open_saved_dataset

            return open_saved_dataset(path, given.get("split", ""), prompt, name=source, where=where)
        files = [str(file) for file in matching_files(path)] or [path]
        if kind == "jsonl":
            parts: list[Source] = [JsonlSource(file, prompt, name=source, where=where) for file in files]
        else:
            from shared.data.tables import open_parquet

            parts = [open_parquet(file, prompt, name=source, where=where) for file in files]
        return parts[0] if len(parts) == 1 else JoinedSource(parts, name=source)
    if kind == "reasoning-gym":
        from shared.data.gym_source import GymSource

        return GymSource(source, where=where)
    raise DataError(f"{where}: source {source!r} has an unknown kind; write {FORMS}")


def _parameters(source: str, query: str, where: str, valid: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters of a source. Raises DataError for an unknown parameter."""
    given = dict(parse_qsl(query, keep_blank_values=True))
    for key in given:
        if key not in valid:
            raise DataError(f"{where}: source {source!r} has unknown parameter {key!r}{nearest(key, valid)}")
    return given
