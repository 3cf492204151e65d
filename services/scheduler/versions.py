"""Published policy versions: which are in a store, which is the newest, and which can be removed.

The module is pure.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from proto.ids import make_task_id
from proto.messages import ErrorCode, PublishWeights, WeightsRef
from services.scheduler.attempts import revive
from services.scheduler.collection import clear_weights
from services.scheduler.evaluations import Evaluation, write_rows
from services.scheduler.leases import Version
from services.scheduler.plan import due
from services.scheduler.plausible import MOST
from services.scheduler.tasks import EVALUATION
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState


class Versions:
    """The versions whose shards are in a store."""

    def __init__(self) -> None:
        self._refs: dict[Version, WeightsRef] = {}

    def __len__(self) -> int:
        return len(self._refs)

    def get(self, version: Version) -> WeightsRef | None:
        return self._refs.get(version)

    @property
    def refs(self) -> list[WeightsRef]:
        return list(self._refs.values())

    @property
    def newest(self) -> Version | None:
        return max(self._refs, default=None)

    def at_step(self, step: int) -> Version | None:
        """Return the version of exactly `step` in the newest lineage that has it, or None."""
        return max((version for version in self._refs if version[1] == step), default=None)

    def put(self, ref: WeightsRef) -> None:
        self._refs[ref.lineage, ref.step] = ref

    def unnamed(self, named: set[Version], oldest_exact: int | None, steps: Container[int] = ()) -> list[WeightsRef]:
        """Remove and return all versions but the newest, those in `named`, and those of a step in `steps`.

        In deterministic mode, `oldest_exact` is the oldest step whose version a task not yet sampled may need; the
        versions of that step and all later steps are kept. For each of these steps and for each step in `steps`, only
        the version of the newest lineage is kept.
        """
        newest = self.newest
        gone = [
            version
            for version in self._refs
            if version != newest
            and version not in named
            and (oldest_exact is None or version[1] < oldest_exact or version != self.at_step(version[1]))
            and not (version[1] in steps and version == self.at_step(version[1]))
        ]
        return [self._refs.pop(version) for version in gone]

    def remove(self, version: Version) -> WeightsRef | None:
        """Remove and return a version, or return None if it is absent."""
        return self._refs.pop(version, None)

    def take_back(self, step: int) -> list[WeightsRef]:
        """Remove and return the versions of steps after `step`."""
        return [self._refs.pop(version) for version in list(self._refs) if version[1] > step]

    def forget(self, store: str) -> None:
        """Remove the versions that were in `store`."""
        self._refs = {version: ref for version, ref in self._refs.items() if ref.store != store}

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self._refs.values())


def publish(run: RunState, request: PublishWeights) -> None:
    """Publish a version, which can then be loaded, and open its evaluations."""
    ref = request.ref
    if ref.lineage != run.lineage:
        raise RpcError(ErrorCode.CONFLICT, f"weights of lineage {ref.lineage}: this driver's lineage is {run.lineage}")
    if not 0 <= ref.step < 1 << 31 or ref.task_id != f"{WEIGHTS}/{ref.lineage}/{ref.step}":
        text = f"weights {ref.task_id[:80]!r} of step {ref.step}: {WEIGHTS}/<lineage>/<step below 2**31> expected"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    if not 0 <= ref.nbytes <= MOST or not 0 <= ref.fence < 1 << 32:
        raise RpcError(ErrorCode.BAD_REQUEST, f"{ref.task_id}: its size or fence is out of range")
    old = run.versions.get((ref.lineage, ref.step))
    if old is not None and old.fence > ref.fence:
        raise RpcError(
            ErrorCode.CONFLICT, f"{ref.task_id}: fence {ref.fence} is outdated; the current one is {old.fence}"
        )
    run.versions.put(ref)
    if old is not None and old.fence < ref.fence:
        clear_weights(run, old)
    _open_evaluations(run, (ref.lineage, ref.step))
    if ref.step == 0 and run.next_row == 0:
        run.waiting_rows.setdefault(0, {"policy/version": 0.0})
    write_rows(run)
    free_versions(run)


def _open_evaluations(run: RunState, version: Version) -> None:
    """Open the evaluations that are due at a newly published version."""
    step = version[1]
    for begun in run.evaluations.open.values():
        if begun.version[1] == step and run.versions.get(begun.version) is None:
            begun.version = version  # the step was published again because the store lost the first version
    for each in due(run.plan, run.config.steps, step):
        if run.evaluations.known(each.name, step):
            continue
        one = Evaluation.of(each.name, version, len(each.rows), each.samples)
        one.waiting = [make_task_id(each.name, step, row) for row in each.rows]
        run.evaluations.open[each.name, step] = one
        if run.lineage:  # the tasks may already exist, for a version that was rolled back
            revive(run, one.waiting)
        else:
            for task_id in one.waiting:
                run.tasks.add(task_id, EVALUATION)


def free_versions(run: RunState) -> None:
    """Remove the versions that no lease, evaluation or reference can still need."""
    if len(run.versions) < 2:
        return
    useful, oldest = run.order.versions_needed(run)
    named = {version for version in run.leases.versions() if version[1] >= useful} | run.evaluations.versions()
    for ref in run.versions.unnamed(named, oldest, _reference_steps(run)):
        clear_weights(run, ref)


def _reference_steps(run: RunState) -> Container[int]:
    """Return the steps of versions that the reference may still need, even after a return to the checkpoint."""
    every = run.plan.reference_every
    first = run.plan.reference_version(min(max(run.checkpoint_step, 0), run.committed_step) + 1)
    return range(max(first, every), run.committed_step + 1, every) if every else ()


def lost_reference(run: RunState) -> int:
    """Return the step of the version that the reference needs, if no store has that version, else 0."""
    step = run.plan.reference_version(run.committed_step + 1)
    return step if step and run.versions.at_step(step) is None else 0
