"""Published policy versions: those in a store, the newest one, and those that can be removed."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

from proto import codec
from proto.messages import PublishWeights, WeightsRef

Version = tuple[int, int]
"""(lineage, step), ordered by lineage first."""


class Versions:
    """The versions whose shards are in a store."""

    def __init__(self) -> None:
        self._refs: dict[Version, WeightsRef] = {}
        self.newest: Version | None = None

    def __len__(self) -> int:
        return len(self._refs)

    def get(self, version: Version) -> WeightsRef | None:
        return self._refs.get(version)

    @property
    def newest_ref(self) -> WeightsRef | None:
        return self._refs[self.newest] if self.newest is not None else None

    def at_step(self, step: int) -> Version | None:
        """Return the version of exactly `step` in the newest lineage that has it, or None."""
        return max((version for version in self._refs if version[1] == step), default=None)

    def put(self, ref: WeightsRef) -> None:
        version = (ref.lineage, ref.step)
        self._refs[version] = ref
        if self.newest is None or version > self.newest:
            self.newest = version

    def unnamed(self, named: set[Version], oldest_exact: int | None, steps: Container[int] = ()) -> list[WeightsRef]:
        """Remove and return all versions but the newest, those in `named`, and those of a step in `steps`.

        In deterministic mode, `oldest_exact` is the oldest step that a task not yet sampled may need; versions from it
        on are kept. Of each step in `steps` or from `oldest_exact` on, only the newest lineage is kept.
        """
        gone = [
            version
            for version in self._refs
            if version != self.newest
            and version not in named
            and (oldest_exact is None or version[1] < oldest_exact or version != self.at_step(version[1]))
            and not (version[1] in steps and version == self.at_step(version[1]))
        ]
        return [self._refs.pop(version) for version in gone]

    def after(self, step: int) -> list[WeightsRef]:
        """Remove and return the versions of steps after `step`, which were taken back."""
        gone = [version for version in self._refs if version[1] > step]
        refs = [self._refs.pop(version) for version in gone]
        self.newest = max(self._refs, default=None)
        return refs

    def forget(self, store: str) -> None:
        """Remove the versions that were in `store`."""
        self._refs = {version: ref for version, ref in self._refs.items() if ref.store != store}
        self.newest = max(self._refs, default=None)

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self._refs.values())

    def dump(self) -> dict[str, Any]:
        return {"refs": [codec.encode_body(PublishWeights(driver=0, ref=ref)) for ref in self._refs.values()]}

    @classmethod
    def load(cls, data: dict[str, Any]) -> Versions:
        versions = cls()
        for packed in data["refs"]:
            versions.put(cast(PublishWeights, codec.decode_body(PublishWeights.TYPE, packed)).ref)
        return versions
