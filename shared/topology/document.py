"""A topology's YAML as plain data that knows where each key came from, with the problems found in it, one line each.

It does not know the meaning of any key. The node graph is walked here instead of being constructed by ruamel. This
gives every key and list item its line, finds all duplicate keys instead of only the first one, and builds nothing but
mappings, lists and plain scalars.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from shared.unusable import Unusable

SHOWN_CHARS = 80
MOST_CHARS = 256 << 10
"""Maximum characters of a topology, and of its values with every alias written out. A value counts as its text and
`_VALUE_CHARS` more."""
MOST_LEVELS = 64
"""Maximum number of mappings and lists around a value."""
_VALUE_CHARS = 10
_TOO_LARGE = f"the topology has more than {MOST_CHARS >> 10} Ki characters"
Path = tuple[str | int, ...]
Found = Iterator[tuple[Path, str]]
"""The findings of a check: the path of a key, and the value, the limit and the remedy in one line."""


def dotted(path: Path) -> str:
    """Join a path in the form that `--set` accepts: `("algorithm", "loss", "clip", 1)` -> `algorithm.loss.clip.1`."""
    return ".".join(str(part) for part in path)


def shown(value: object) -> str:
    """Return `value` for a one-line error: its repr, truncated to `SHOWN_CHARS` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


@dataclass(frozen=True)
class Problem:
    """One problem: `where` is `file:line` or `--set a.b=v`, and `path` is the path of the key concerned."""

    where: str
    path: Path
    message: str

    def __str__(self) -> str:
        parts = [self.where, dotted(self.path), self.message] if self.path else [self.where, self.message]
        return " ".join(": ".join(parts).splitlines())


class TopologyError(Unusable):
    """A topology that cannot run. `problems` holds every problem found; `str()` gives one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass
class Document:
    """A topology file as plain data: mappings, lists, str, int, float, bool and None."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    origins: dict[Path, str] = field(default_factory=dict)
    _chars: int = 0
    """Size of the values so far, as `MOST_CHARS` counts it."""
    _constructor: Any = field(default_factory=lambda: _yaml().constructor)

    def where(self, path: Path) -> str:
        """Return the origin, `file:line` or `--set`, of the key at `path` or of the nearest written key above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return f"{self.file}:1"

    def report(self, path: Path, message: str) -> None:
        self.problems.append(Problem(self.where(path), path, message))

    def override(self, setting: str, former: Mapping[tuple[str, ...], tuple[str, ...]]) -> None:
        """Apply one `a.b=v`. `v` is YAML, and a number indexes a list. Missing mappings are created.

        `former` are former places of sections with their present ones. Keys below them are set in the present place.
        """
        label = f"--set {setting}"
        key, equals, text = setting.partition("=")
        names = [part.strip() for part in key.split(".")]
        if not equals or not all(names):
            self.problems.append(Problem(label, (), "not an override; it must look like a.b=value"))
            return
        for old, new in former.items():
            if (*names[: len(old)],) == old:
                names[: len(old)] = new
        try:
            node = _yaml().compose(text)
        except (YAMLError, RecursionError) as error:
            self.problems.append(Problem(label, (), f"value is not YAML ({_reason(error)}); quote it"))
            return
        container: Any = self.data
        path: Path = ()
        for position, name in enumerate(names):
            step = self._step(container, name, label, path)
            if step is None:
                return
            path += (step,)
            if position == len(names) - 1:
                self.forget(path)
                self.origins[path] = label
                container[step] = None if node is None else self._plain(node, path, label, ())
            elif isinstance(container, dict) and container.get(step) is None:
                container[step] = {}
                self.origins[path] = label
            container = container[step]

    def _step(self, container: Any, name: str, label: str, path: Path) -> str | int | None:
        """Return `name` as a key or index of `container`, or None after reporting why it is neither."""
        if isinstance(container, dict):
            return name
        if not isinstance(container, list):
            message = f"no key {name!r} below it: it holds {shown(container)}"
            self.problems.append(Problem(label, path, message))
        elif re.fullmatch(r"[0-9]+", name) and int(name) < len(container):
            return int(name)
        else:
            message = f"no item {name!r}: the list has items 0 to {len(container) - 1}; set the whole list"
            self.problems.append(Problem(label, path, message))
        return None

    def move(self, old: tuple[str, ...], new: tuple[str, ...]) -> None:
        """Move the items of a section from its former place to its present one."""
        above: Any = self.data
        for part in old[:-1]:
            above = above.get(part) if isinstance(above, dict) else None
        items = above.get(old[-1]) if isinstance(above, dict) else None
        if not isinstance(items, dict):
            return  # missing, or reported as an unknown key
        target: Any = self.data
        for part in new:
            target = target.setdefault(part, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            return  # the value there is reported
        del above[old[-1]]
        placed = {name: value for name, value in items.items() if name not in target}
        for name in items:
            if name not in placed:
                self.report((*old, name), f"given twice, also as {dotted((*new, name))}; remove one")
        target.update(placed)
        below = len(old)
        for origin in [origin for origin in self.origins if origin[:below] == old and origin[below:][:1] != ()]:
            if origin[below] in placed:
                self.origins[(*new, *origin[below:])] = self.origins.pop(origin)

    def forget(self, path: Path) -> None:
        """Drop the origins at and below `path`, whose value is about to be replaced."""
        for origin in [origin for origin in self.origins if origin[: len(path)] == path]:
            del self.origins[origin]

    def _plain(self, node: Node, path: Path, label: str | None, above: tuple[int, ...]) -> Any:
        """Return the data of `node` and record its origins. `label` replaces file:line for an override.

        Raises TopologyError for a value that makes the document too large or too deep.
        """
        if id(node) in above:
            self.report(path, "an alias that contains itself; write the value out")
            return None
        above += (id(node),)
        if len(above) > MOST_LEVELS:
            raise self._refused(path, f"is within more than {MOST_LEVELS} mappings and lists; use fewer")
        self._count(node, path)
        if not isinstance(node, ScalarNode) and node.tag not in _COLLECTION_TAGS:
            self.report(path, f"has the tag {shown(node.tag)}; write a plain value")
            return None
        if isinstance(node, MappingNode):
            return self._mapping(node, path, label, above)
        if isinstance(node, SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.origins[(*path, index)] = label or self._line(item)
                items.append(self._plain(item, (*path, index), label, above))
            return items
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: Path, label: str | None, above: tuple[int, ...]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node, merged in self._items(node, path, above):
            where = label or self._line(key_node)
            if not isinstance(key_node, ScalarNode):
                self.problems.append(Problem(where, path, "a key must be a string, not a list or mapping"))
                continue
            name = str(key_node.value)
            here = (*path, name)
            if name in mapping:
                if not merged:
                    first = self.origins[here]
                    self.problems.append(Problem(where, here, f"duplicate key, first at {first}; remove one"))
                continue
            self.origins[here] = where
            mapping[name] = self._plain(value_node, here, label, above)
        return mapping

    def _items(
        self, node: MappingNode, path: Path, above: tuple[int, ...], *, merged: bool = False
    ) -> Iterator[tuple[Node, Node, bool]]:
        """Yield the key and the value of each item of a mapping, its own items before those that `<<` merges into it,
        and whether it is merged. The first item of a name is the one that counts."""
        sources: list[Node] = []
        for key, value in node.value:
            self._count(key, path)
            if key.tag == _MERGE_TAG:
                sources += value.value if isinstance(value, SequenceNode) else [value]
            else:
                yield key, value, merged
        for source in sources:
            if not isinstance(source, MappingNode) or id(source) in above:
                self.report(path, "<< needs an alias of another mapping, or a list of such aliases")
                continue
            yield from self._items(source, path, (*above, id(source)), merged=True)

    def _count(self, node: Node, path: Path) -> None:
        """Raise TopologyError if the values so far, with this one, make the document too large."""
        self._chars += _VALUE_CHARS + (len(node.value) if isinstance(node, ScalarNode) else 0)
        if self._chars > MOST_CHARS:
            raise self._refused(path, f"{_TOO_LARGE} with every alias written out; use fewer aliases or values")

    def _refused(self, path: Path, message: str) -> TopologyError:
        return TopologyError([Problem(self.where(path), path, message)])

    def _scalar(self, node: Node, path: Path) -> str | int | float | bool | None:
        try:
            value = self._constructor.construct_object(node)
        except (YAMLError, ValueError) as error:
            self._constructor = _yaml().constructor  # an error leaves the node marked as one that contains itself
            self.report(path, f"cannot be read ({_reason(error)}); write a plain value")
            return None
        if value is None or isinstance(value, str | int | float):
            return value
        self.report(path, f"is a {type(value).__name__} in YAML ({shown(node.value)}); quote it")
        return None

    def _line(self, node: Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"


def read(path: str | os.PathLike[str]) -> Document:
    """Read as much of the document at `path` as possible. Errors such as duplicate keys are listed in its `problems`.

    Raises TopologyError if nothing can be read: the file is missing, not UTF-8, not YAML, or not a mapping.
    """
    file = os.fspath(path)
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read(MOST_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError([Problem(file, (), f"cannot be read ({_reason(error)})")]) from error
    if len(text) > MOST_CHARS:
        raise TopologyError([Problem(file, (), f"{_TOO_LARGE}; is it a topology?")])
    try:
        node = _yaml().compose(text)
    except (YAMLError, RecursionError) as error:
        raise TopologyError([Problem(_mark(file, error), (), f"not YAML: {_reason(error)}")]) from error
    if not isinstance(node, MappingNode):
        raise TopologyError([Problem(f"{file}:1", (), "must be a mapping with the keys run, policy, data, ...")])
    document = Document(file)
    document.data = document._mapping(node, (), None, (id(node),))
    return document


def plain(text: str) -> Any:
    """Return the data of a resolved topology, as written by `dump`. Raises a one-line ValueError.

    Every reader uses this function instead of PyYAML, which reads YAML 1.1, where the key `off` is false.
    """
    try:
        return _yaml().load(text)
    except YAMLError as error:
        raise ValueError(f"not YAML: {_reason(error)}") from error


def dump(data: dict[str, Any]) -> str:
    """Return `data` as block-style YAML in the given order. `read` returns equal data."""
    stream = StringIO()
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 1_000_000  # a folded string is harder to read than a long line
    yaml.dump(data, stream)
    return stream.getvalue()


def _yaml() -> YAML:
    # The loader is pure and safe, because the C loader reads YAML 1.1 (where `no` is false), and the round-trip loader
    # returns its own subclasses of int, float and bool.
    return YAML(typ="safe", pure=True)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "too many mappings and lists within each other"
    if isinstance(error, MarkedYAMLError):
        return " ".join(part for part in (error.context, error.problem) if part)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def _mark(file: str, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return file if mark is None else f"{file}:{mark.line + 1}"
