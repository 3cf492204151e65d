"""The history of a run: its drivers, steps, versions and evaluations, and the rows of its metrics. The module is pure.

Each step is batched and committed once. What happens to the tasks of a step is decided in `ledger.py` and `steps.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from proto.ids import split_task_id
from proto.messages import CheckpointSaved, ErrorCode, PublishWeights, PutTask, TaskState, WeightsRef
from proto.tensors import Array
from services.scheduler.evaluations import Evaluation, Evaluations
from services.scheduler.events import Configure, DiscardRows, Effect, ForgetSteps, Rewound, SaveStep, Tell, WriteRow
from services.scheduler.leases import Version
from services.scheduler.plan import Plan, due
from services.scheduler.registry import MOST
from services.scheduler.tasks import Task
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS

_SAVED = (
    "driver", "old_drivers", "lineage", "batched_step", "committed_step", "checkpoint_step", "finished", "broken",
    "next_row", "lost_version",
)  # fmt: skip


class Versions:
    """The policy versions whose shards are in a store."""

    def __init__(self) -> None:
        self.refs: dict[Version, WeightsRef] = {}

    @property
    def newest(self) -> Version | None:
        return max(self.refs, default=None)

    def at_step(self, step: int) -> Version | None:
        """Return the version of exactly `step` in the newest lineage that has it, or None."""
        return max((version for version in self.refs if version[1] == step), default=None)

    def put(self, ref: WeightsRef) -> None:
        self.refs[ref.lineage, ref.step] = ref

    def unnamed(self, named: set[Version], oldest_exact: int | None, steps: Container[int] = ()) -> list[WeightsRef]:
        """Remove and return all versions but the newest, those in `named`, and those of a step in `steps`.

        In deterministic mode, `oldest_exact` is the oldest step whose version a task not yet sampled may need; the
        versions of that step and all later steps are kept. For each of these steps and for each step in `steps`, only
        the version of the newest lineage is kept.
        """
        newest = self.newest
        gone = [
            version
            for version in self.refs
            if version != newest
            and version not in named
            and not (
                version == self.at_step(version[1])
                and (version[1] in steps or (oldest_exact is not None and version[1] >= oldest_exact))
            )
        ]
        return [self.refs.pop(version) for version in gone]

    def take_back(self, step: int) -> list[WeightsRef]:
        """Remove and return the versions of steps after `step`."""
        return [self.refs.pop(version) for version in list(self.refs) if version[1] > step]

    def forget(self, store: str) -> None:
        """Remove the versions that were in `store`."""
        self.refs = {version: ref for version, ref in self.refs.items() if ref.store != store}

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.refs.values())


class RunHistory:
    """The steps, versions, evaluations and rows of a run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._effects: list[Effect] = []
        self.identities: dict[int, list[str]] = {}
        """Task ids of each step, kept until the oldest checkpoint to which recovery may fall back covers the step."""
        self.waiting_rows: dict[int, dict[str, float]] = {}
        """Metrics rows by step that wait for an evaluation."""
        self.config = Configure(steps=0, attempts=3, keep_last=2, collect_at_commit=False)
        self.driver = 0
        self.old_drivers: list[int] = []
        self.lineage = 0
        self.batched_step = 0
        self.committed_step = 0
        self.checkpoint_step = -1
        self.finished = False
        self.broken = ""
        """In deterministic mode, the reason why the run cannot continue bit-identically, or an empty string."""
        self.lost_version = ""
        """Task id of a version that its store has lost, or an empty string. It is reset when the driver resumes."""
        self.batches: dict[int, list[Task]] = {}
        """Tasks of each journaled step, in batch order, kept until they are collected."""
        self.versions = Versions()
        self.evaluations = Evaluations()
        self.next_row = 0 if plan.evals else 1

    def saved(self) -> dict[str, Any]:
        """Return the values that a snapshot stores unchanged."""
        return {name: getattr(self, name) for name in _SAVED}

    def restore(
        self,
        saved: dict[str, Any],
        config: Configure,
        batches: dict[int, list[Task]],
        identities: dict[int, list[str]],
        waiting_rows: dict[int, dict[str, float]],
        evaluations: Evaluations,
    ) -> None:
        """Replace the whole content with that of a snapshot, except the versions."""
        for name in _SAVED:
            setattr(self, name, saved[name])
        self.config, self.batches, self.evaluations = config, batches, evaluations
        self.identities, self.waiting_rows = identities, waiting_rows

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call.

        Metrics rows are written in step order, each as soon as the evaluations due at its version are complete.
        """
        while self.next_row in self.waiting_rows and self.evaluated(self.next_row) is not None:
            step = self.next_row
            row = {"step": 0.0, **self.waiting_rows.pop(step), **self.evaluations.row(step)}
            self._effects.append(WriteRow(step, row | {"step": float(step)}))
            self.next_row += 1
        effects, self._effects = self._effects, []
        return effects

    # ---- drivers

    def check_driver(self, driver: int) -> None:
        """Raise RpcError(conflict) unless `driver` is the current driver of the run."""
        if driver != self.driver:
            raise RpcError(ErrorCode.CONFLICT, f"driver {driver}: a newer driver has taken over, or GetRunInfo is due")

    def check_versions(self) -> None:
        """Raise RpcError(missing) if a store has lost a version and the driver has not resumed since."""
        if self.lost_version:
            text = f"{self.lost_version}: its store has lost it; resume and publish it again"
            raise RpcError(ErrorCode.MISSING, text)

    def take_over(self, driver: int) -> None:
        """Let a driver take over the run. It publishes the versions that may be needed again."""
        if driver in self.old_drivers:
            raise RpcError(ErrorCode.CONFLICT, f"driver {driver}: a newer driver has taken over")
        if driver != self.driver:
            if self.driver:
                self.old_drivers.append(self.driver)
            self.driver = driver
        self.lost_version = ""

    def require_resume(self) -> None:
        """Require the driver to resume, because its workers and its published version are not at the run's step.

        Versions trained from now on differ from those published before.
        """
        self.finished = self.finished and self.committed_step >= self.config.steps
        self.begin_lineage()
        self.driver = 0

    def begin_lineage(self, *, at_least: int = 0, distance: int = 1) -> None:
        """Begin a new lineage, `distance` above the highest one, which is `at_least` or more."""
        self.lineage = max(self.lineage, at_least) + distance

    def configure(self, config: Configure) -> None:
        """Apply the settings of a start. A resumed run may have been given more attempts and more steps."""
        self.config = config
        self.broken = ""
        self.finished = self.finished and self.committed_step >= config.steps

    def finish(self, driver: int) -> None:
        self.check_driver(driver)
        self.finished = True

    def break_off(self, reason: str) -> None:
        """Note that the run cannot continue bit-identically."""
        self.broken = reason

    # ---- steps

    @property
    def open_batch(self) -> list[Task]:
        """The tasks of the step that has been batched but not committed, if any."""
        return self.batches.get(self.batched_step, []) if self.batched_step > self.committed_step else []

    def trained(self) -> Iterator[Task]:
        """Yield the tasks of the committed steps that have not been collected."""
        return (task for step, tasks in self.batches.items() if step <= self.committed_step for task in tasks)

    def take_batch(self, step: int) -> list[Task]:
        """Remove and return the tasks of a step."""
        return self.batches.pop(step)

    def begin_step(self, step: int, tasks: list[Task]) -> None:
        """Note the batch of the next step."""
        names = [task.task_id for task in tasks]
        self.batches[step] = tasks
        self.identities[step] = names
        self.batched_step = step
        self._effects.append(SaveStep(step, TaskState.BATCHED, names))

    def reopen_step(self) -> list[Task]:
        """Remove and return the batch of the open step."""
        step = self.batched_step
        del self.identities[step]
        self.batched_step = self.committed_step
        return self.take_batch(step)

    def commit(self, step: int) -> list[Task] | None:
        """Commit the open step and return its tasks, or return None if the step was already committed."""
        if step <= self.committed_step:
            return None
        if step != self.batched_step:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"commit of step {step}: step {self.committed_step} is committed "
                f"and the open step is {self.batched_step if self.batched_step > self.committed_step else 'none'}",
            )
        self.committed_step = step
        self._effects.append(SaveStep(step, TaskState.TRAINED))
        return self.batches[step]

    def checkpoint(self, request: CheckpointSaved) -> list[int]:
        """Note a checkpoint, and return the steps of the checkpoints to which recovery may fall back, in order."""
        if not 0 <= request.step <= self.committed_step:
            text = f"checkpoint of step {request.step}: step {self.committed_step} is committed"
            raise RpcError(ErrorCode.CONFLICT, text)
        # Checkpoints newer than the committed step belong to steps that were rolled back.
        kept = sorted({request.step, *(step for step in request.kept if step <= self.committed_step)})
        kept = kept[-(self.config.keep_last + request.at_stop) :]
        self.checkpoint_step = kept[-1]
        return kept

    def forget_before(self, step: int, kept: Sequence[int], remembered: int) -> None:
        """Forget what no return to `step` or a later one can need: task ids, evaluations and, except for the last
        `remembered` steps before `step`, batches and rows in the journal.

        `kept` holds the steps whose checkpoints exist. Rows that are not written yet are kept.
        """
        self.identities = {later: names for later, names in self.identities.items() if later > step}
        self.evaluations.forget(min(step, self.next_row), kept)
        last = min(step, self.next_row - 1 - remembered)
        if last > 0:
            self._effects.append(ForgetSteps(last))

    def lower_checkpoint(self, step: int) -> None:
        """Note that later checkpoints than that of `step` hold the weights of steps that were rolled back."""
        self.checkpoint_step = min(self.checkpoint_step, step or -1)

    def return_to(self, step: int, *, reached: int, cause: str, keep_rows: bool) -> None:
        """Return to `step`. The rows of later steps are discarded, unless the steps will produce the same rows again.

        If the journal no longer contains the newest committed step, `reached` is that step.
        """
        committed = max(self.committed_step, reached)
        if step < committed:
            self._effects.append(Rewound(self.lineage, step, committed, cause))
            later = [row for row in self.waiting_rows if row > step]
            waiting = {row: self.waiting_rows.pop(row) for row in later}
            if not keep_rows:
                self._effects.append(DiscardRows(self.lineage, step, waiting))
                self.next_row = min(self.next_row, step + 1)
        self.batched_step = self.committed_step = min(step, self.committed_step)

    def take_identities(self, step: int) -> list[str]:
        """Remove and return the task ids of the steps after `step`."""
        return [name for later in list(self.identities) if later > step for name in self.identities.pop(later)]

    # ---- versions

    @property
    def version_bytes(self) -> int:
        """Bytes to reserve for weight versions, which are as large as the plan says or as the newest one."""
        newest = self.versions.refs.get(self.versions.newest) if self.versions.newest is not None else None
        largest = max(self._plan.weight_bytes, newest.nbytes if newest else 0)
        return max(self.versions.nbytes, self._plan.weight_versions * largest)

    def publish(self, request: PublishWeights) -> WeightsRef | None:
        """Publish a version, which can then be loaded. Return the version that it replaces, if its shards differ."""
        self.check_driver(request.driver)
        ref = request.ref
        if ref.lineage != self.lineage:
            text = f"weights of lineage {ref.lineage}: this driver's lineage is {self.lineage}"
            raise RpcError(ErrorCode.CONFLICT, text)
        if not 0 <= ref.step < 1 << 31 or ref.task_id != f"{WEIGHTS}/{ref.lineage}/{ref.step}":
            text = f"weights {ref.task_id[:80]!r} of step {ref.step}: {WEIGHTS}/<lineage>/<step below 2**31> expected"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if not 0 <= ref.nbytes <= MOST or not 0 <= ref.fence < 1 << 32:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{ref.task_id}: its size or fence is out of range")
        old = self.versions.refs.get((ref.lineage, ref.step))
        if old is not None and old.fence > ref.fence:
            text = f"{ref.task_id}: fence {ref.fence} is outdated; the current one is {old.fence}"
            raise RpcError(ErrorCode.CONFLICT, text)
        self.versions.put(ref)
        if ref.step == 0 and self.next_row == 0:
            self.waiting_rows.setdefault(0, {"policy/version": 0.0})
        return old if old is not None and old.fence < ref.fence else None

    def is_live_version(self, store: str, shard: PutTask) -> bool:
        """Return whether these shards in a store are those of a published version."""
        version = _version_of(shard.task_id)
        ref = self.versions.refs.get(version) if version is not None else None
        return ref is not None and (ref.store, ref.fence) == (store, shard.fence)

    def lose_version(self, task_id: str) -> bool:
        """Forget a version that its store has lost. Return False if no such version is published."""
        version = _version_of(task_id)
        if version is None or self.versions.refs.pop(version, None) is None:
            return False
        self.lost_version = task_id
        return True

    def reference_steps(self) -> Container[int]:
        """Return the steps of versions that the reference may still need, even after a return to the checkpoint."""
        every = self._plan.reference_every
        first = self._plan.reference_version(min(max(self.checkpoint_step, 0), self.committed_step) + 1)
        return range(max(first, every), self.committed_step + 1, every) if every else ()

    def lost_reference(self) -> int:
        """Return the step of the version that the reference needs, if no store has that version, else 0."""
        step = self._plan.reference_version(self.committed_step + 1)
        return step if step and self.versions.at_step(step) is None else 0

    # ---- evaluations

    def open_evaluation(self, name: str, version: Version, samples: int, waiting: list[str]) -> None:
        """Open an evaluation of a version. Its tasks, one for each row of the set, are `waiting` for a lease."""
        self.evaluations.open[name, version[1]] = Evaluation.of(name, version, samples, waiting)

    def score(self, evaluation: Evaluation, row: int, scalars: Mapping[str, Array], failed: int) -> None:
        """Score a row of an evaluation. `scalars` holds the rewards of the row's scored samples."""
        evaluation.score(bisect_left(self._plan.eval_rows(evaluation.name), row), scalars, failed)
        self.end_task(evaluation)

    def end_task(self, evaluation: Evaluation) -> None:
        """Count a task that was scored or dropped. The last task completes the evaluation."""
        evaluation.left -= 1
        if evaluation.left:
            return
        step = evaluation.version[1]
        del self.evaluations.open[evaluation.name, step]
        self.evaluations.done.setdefault(step, {})[evaluation.name] = evaluation.metrics()
        self._effects.append(Tell("eval", {"step": step, **evaluation.metrics()}))

    def evaluated(self, step: int) -> dict[str, float] | None:
        """Return the mean rewards of the evaluations due at version `step`, or None while some are missing."""
        done = self.evaluations.rewards(step)
        wanted = [planned.name for planned in due(self._plan, self.config.steps, step)]
        return {name: done[name] for name in wanted} if all(name in done for name in wanted) else None

    # ---- rows

    def add_row(self, step: int, row: dict[str, float]) -> None:
        """Add the metrics row of a committed step, unless the step is trained again and its row was written before."""
        if step >= self.next_row:
            self.waiting_rows[step] = row


def _version_of(task_id: str) -> Version | None:
    split, lineage, step = split_task_id(task_id)
    return (lineage, step) if split == WEIGHTS else None
