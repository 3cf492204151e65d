"""Tests the store and the scheduler together, with any events between them. Promises 1 to 4 are invariants, and the
state is compared with a plain model.

Both state machines are the real ones. The bus between them (clears, inventories) is a set of messages, which can be
delivered late, twice or not at all. Either side can be killed, even in the middle of a put: the scheduler recovers from
its journal, or from a snapshot and the rest of the journal; the store from its files (sealed, granted, being retired,
kept for their pages) and tombstones. Files may be damaged. A producer can be killed between its grant and its seal.
Everything can be killed at once, together with the stores' memory; the run then continues from its newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto import blockfile
from proto.blockfile import BlockLayout, Table
from proto.messages import (
    Canary,
    CheckpointSaved,
    CommitStep,
    Complete,
    ErrorCode,
    GetRunInfo,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    PutTask,
    Register,
    ReportShards,
    RunInfo,
    StepBatch,
    TaskResult,
)
from services.batch_store import room
from services.batch_store.room import Removal, Tier, held_bytes
from services.batch_store.state import GRANT_S, StoreState
from services.scheduler import run_state
from services.scheduler.events import (
    Answer,
    Asked,
    Checked,
    CheckShards,
    ClearDone,
    Configure,
    Durable,
    Effect,
    Fail,
    Listed,
    Persist,
    RequestInventory,
    SendClear,
    ShardsLost,
    Tick,
)
from services.scheduler.plan import Plan
from services.scheduler.state import Scheduler
from services.scheduler.steps import replayable
from shared.rpc.errors import RpcError
from shared.stages import REFERENCE, ROLLOUT
from tests.property import scheduler_view as view
from tests.weights_refs import weights_ref

pytestmark = pytest.mark.slow

STORE = "batch-store/0"
PAGE = 4096
LIMIT = 40 * PAGE
SPILL = 10 * PAGE
LEASE_S = 5.0
CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)
KEYS = {"rollout": "tokens", "reference": "ref"}
CONFIG = Configure(1000, 50, 2, False)
PLAN = Plan(
    run="model",
    seed=3,
    tasks_per_step=2,
    group_size=2,
    staleness=1,
    shuffle=True,
    deterministic=False,
    rows=range(5),
    stages=(ROLLOUT, REFERENCE),
    task_bytes=3 * PAGE,
    overhead_bytes=3 * PAGE,
    replay_bytes=2 * PAGE,
    weight_bytes=PAGE,
    weight_versions=3,
)


def block(tasks: list[tuple[str, int]], key: str) -> tuple[Table, int]:
    layout = BlockLayout([(task_id, fence, {key: np.zeros(100)}) for task_id, fence in tasks])
    digests = [hash((task_id, fence, key)) & 0xFFFF for task_id, fence in tasks]
    return blockfile.parse(layout.head(digests), layout.file_bytes), layout.file_bytes


@dataclass(frozen=True)
class Writing:
    """A put from its producer's point of view, between its grant and its seal."""

    tasks: list[tuple[str, int]]
    key: str
    table: Table
    nbytes: int

    @property
    def names(self) -> list[PutTask]:
        return [PutTask(*task) for task in self.tasks]


class Both(RuleBasedStateMachine):
    """The store and the scheduler, and the events that concern either of them.

    `accepted` holds the shards that the scheduler has accepted but not collected. Promise 1 applies to these shards.
    """

    def __init__(self) -> None:
        super().__init__()
        # In this test, files of a page or two are worth keeping.
        self.small = mock.patch.object(room, "SPARE_BYTES", 1)
        self.small.start()
        self.now = 0.0
        self.journal: list[Durable] = []
        self.kept: bytes | None = None
        self.life = 100
        self.data_id = "first"
        """Identity of the store's data. It changes when all data is lost."""
        self.workers = {"rollout": 1, "reference": 1}
        self.grants: list[tuple[LeaseGrant, int]] = []
        self.writing: dict[str, Writing] = {}
        self.granted: dict[str, int] = {}
        """Unsealed files and their sizes. Some of the producers are dead, and some files were lost with an earlier life
        of the store."""
        self.files: dict[str, tuple[Table, int, Tier]] = {}
        """Sealed files, in the order of their seals."""
        self.zombies: dict[str, tuple[Tier, int]] = {}
        self.spares: dict[str, int] = {}
        self.tombs: dict[str, int] = {}
        self.puts = 0
        self.mail: list[SendClear] = []
        self.lists = False
        self.accepted: dict[str, tuple[int, set[str]]] = {}
        self.batches: dict[int, list[tuple[str, int]]] = {}
        self.newest: dict[str, int] = {}
        """Highest fence of each task that was leased."""
        self.cleared: set[tuple[str, int]] = set()
        self.checkpoints: list[int] = []
        self.damaged = False
        """Whether the store has just lost shards. If so, the scheduler may find that shards are missing."""
        self.store = StoreState(STORE, LIMIT, self.life, SPILL)
        self.machine = Scheduler(PLAN, lease_s=LEASE_S, incarnation=1)
        self.take(self.machine.begin(CONFIG, 0.0))
        self.register_store()
        for service, life in self.workers.items():
            self.register(service, life)
        self.ask(GetRunInfo(driver=1))
        self.publish(0)

    # ---- messages between scheduler and store

    def take(self, effects: list[Effect]) -> Any:
        answer: Any = None
        for effect in effects:
            match effect:
                case Persist():
                    assert self.damaged or not isinstance(effect.event, ShardsLost)
                    self.journal.append(effect.event)
                case CheckShards():
                    tasks = [claim.task for claim in effect.claims]
                    held = {(task.task_id, task.fence): self.store.content_hashes(task) for task in tasks}
                    found = {name: hashes for name, hashes in held.items() if hashes}
                    self.take(self.machine.handle(Checked(effect, found), self.now))
                case SendClear():
                    self.mail.append(effect)
                case RequestInventory():
                    self.lists = True
                case Answer(ref="call"):
                    answer = effect.body
                case Fail(ref="call"):
                    answer = effect
        return answer

    def ask(self, request: Any) -> Any:
        answer = self.take(self.machine.handle(Asked("call", request, self.now), self.now))
        # A call that is deferred is answered at once, because its deadline is now.
        held = self.take(self.machine.handle(Tick(), self.now))
        return answer if answer is not None else held

    def register(self, service: str, life: int, limit_bytes: int = 0) -> None:
        request = Register(
            service=service,
            instance=0,
            incarnation=life,
            pid=1,
            host="h",
            endpoint="",
            limit_bytes=limit_bytes,
            data_id=self.data_id if service == "batch-store" else "",
        )
        self.ask(request)

    def register_store(self) -> None:
        self.register("batch-store", self.life, self.store.room.limit_bytes)

    def retire(self, effects: list[Removal]) -> None:
        for effect in effects:
            put_id, _, kind = effect.source.partition(".")
            if kind == "tmp":
                nbytes, place = self.granted.pop(put_id), Tier.MEMORY
            else:
                _, nbytes, place = self.files.pop(put_id)
            assert place == effect.place
            self.zombies[effect.target] = (place, held_bytes(nbytes))

    def put(self, tasks: list[tuple[str, int]], key: str) -> str:
        """Begin the put if it has not begun, and seal it. Return the code of the refusal, or an empty string."""
        put_id = self.open_put(tasks, key) or self.new_put(tasks, key)
        code = self.finish(put_id)
        self.writing.pop(put_id, None)  # If there is no room, the put fails at its deadline.
        return code

    def open_put(self, tasks: list[tuple[str, int]], key: str) -> str | None:
        return next((name for name, put in self.writing.items() if (put.tasks, put.key) == (tasks, key)), None)

    def new_put(self, tasks: list[tuple[str, int]], key: str) -> str:
        self.puts += 1
        put_id = f"{self.puts:032x}"
        self.writing[put_id] = Writing(tasks, key, *block(tasks, key))
        return put_id

    def finish(self, put_id: str) -> str:
        """Write and seal.

        Begin if there is no grant, because none has been requested yet or the store has died. Return the last code.
        """
        code = self.seal(put_id)
        if code == ErrorCode.MISSING:
            code = self.begin(put_id) or self.seal(put_id)
        if code != ErrorCode.BUSY:
            del self.writing[put_id]
        return code

    def begin(self, put_id: str) -> str:
        put = self.writing[put_id]
        try:
            self.store.check(put_id, put.nbytes, put.names)
            self.delete(self.store.make_room(put_id, put.nbytes))
            while self.store.lacks_room(put_id, put.nbytes) and self.spill():
                pass
            spare = self.store.spare(put_id, put.nbytes)
            new = self.store.begin(put_id, put.nbytes, put.names, self.now, spare)
            if spare is not None:
                del self.spares[spare]  # The grant has the spare's pages, or the spare was deleted.
        except RpcError as error:
            return error.code
        assert new == (put_id not in self.granted)
        self.granted[put_id] = put.nbytes
        return ""

    def seal(self, put_id: str) -> str:
        put = self.writing[put_id]
        try:
            nbytes = self.store.to_seal(put_id)
        except RpcError as error:
            assert put_id not in self.granted
            return error.code
        assert nbytes == put.nbytes == self.granted[put_id]
        try:
            new = self.store.has_new_shards(put_id, put.table)
        except RpcError as error:
            self.retire([self.store.abandon(put_id)])
            return error.code
        if new:
            self.store.seal(put_id, put.table)
            self.files[put_id] = (put.table, self.granted.pop(put_id), Tier.MEMORY)
            self.retire(self.store.supersede(put_id))
        else:
            self.retire([self.store.abandon(put_id)])
        return ""

    def delete(self, spares: list[str]) -> None:
        """Delete the files of spares that the index has discarded."""
        for name in spares:
            del self.spares[name]
            self.store.room.reaped(name)

    def take_back(self, now: float) -> None:
        """Withdraw those overdue grants whose producers hold no lock."""
        for put_id in self.store.overdue(now):
            if put_id not in self.writing:
                self.retire([self.store.abandon(put_id)])

    def spill(self) -> bool:
        put_id = self.store.begin_move()
        if put_id is None:
            return False
        table, nbytes, _ = self.files[put_id]
        effect = self.store.end_move(put_id)
        self.zombies[effect.target] = (Tier.MEMORY, held_bytes(nbytes))
        self.files[put_id] = (table, nbytes, Tier.DISK)
        return True

    def publish(self, step: int) -> None:
        name = f"weights/{self.machine.run.history.lineage}/{step}"
        if self.put([(name, 1)], "w") == ErrorCode.BUSY:
            self.deliver_all()  # There is room once the ordered clears are done and no reader maps the files.
            assert self.put([(name, 1)], "w") == ""
        ref = weights_ref(self.machine.run.history.lineage, step, CANARY)
        self.ask(PublishWeights(driver=1, ref=ref))

    def deliver_all(self) -> None:
        """Let live producers finish writing, withdraw the grants of dead producers, let stores acknowledge every
        clear, and let readers finish.
        """
        for put_id in list(self.writing):
            self.finish(put_id)
        self.writing.clear()
        self.take_back(self.now + GRANT_S + 1)
        while self.mail:
            self.deliver(self.mail.pop(0))
        self.last_mappings_go()

    def deliver(self, sent: SendClear, *, answered: bool = True) -> None:
        self.retire(self.store.clear(sent.tasks))
        for task in sent.tasks:
            self.tombs[task.task_id] = max(self.tombs.get(task.task_id, 0), task.fence)
            self.cleared.add((task.task_id, task.fence))
        if sent.tracked and answered:
            self.take(self.machine.handle(ClearDone(sent.store, len(sent.tasks)), self.now))

    # ---- events

    @rule(stage=st.sampled_from(sorted(KEYS)), most=st.integers(1, 3))
    def lease(self, stage: str, most: int) -> None:
        life = self.workers[stage]
        grant = self.ask(LeaseRequest(stage=stage, service=stage, instance=0, incarnation=life, max_tasks=most))
        if isinstance(grant, LeaseGrant):
            self.grants.append((grant, life))
            for task in grant.batch.tasks:
                self.newest[task.task_id] = task.fence
                # A task is never leased again after its collection.
                assert (task.task_id, task.fence) not in self.cleared
                if stage == "reference":  # The shards that the reference reads exist.
                    self.store.locate([PutTask(task.task_id, task.fence)])

    @precondition(lambda self: self.grants)
    @rule(
        data=st.data(), outcome=st.sampled_from((Outcome.DONE,) * 4 + (Outcome.RETRY, Outcome.DROP)), late=st.booleans()
    )
    def complete(self, data: st.DataObject, outcome: int, late: bool) -> None:
        at = data.draw(st.integers(0, len(self.grants) - 1))
        self.end(*(self.grants[at] if late else self.grants.pop(at)), outcome)

    @rule()
    def all_goes_well_for_a_step(self) -> None:
        for stage in ("rollout", "rollout", "reference", "reference"):
            self.lease(stage, 3)
            while self.grants:
                self.last_mappings_go()
                self.end(*self.grants.pop(), Outcome.DONE)
        self.train()

    def end(self, grant: LeaseGrant, life: int, outcome: int) -> None:
        key = KEYS[grant.stage]
        tasks = [(task.task_id, task.fence) for task in grant.batch.tasks]
        code = self.put(tasks, key) if outcome == Outcome.DONE else ""
        if code == ErrorCode.BUSY and grant.stage != "rollout":
            self.deliver_all()  # Room is made only by clears and unmapped files, never by live tasks.
            code = self.put(tasks, key)
            assert code != ErrorCode.BUSY
        if code:
            # The put is refused if the lease was lost, or if the store is full of mapped collected files.
            outcome = Outcome.RETRY
        samples = 2 if grant.stage == "rollout" and outcome == Outcome.DONE else 0
        table, _ = block(tasks, key)
        results = [
            TaskResult(*task, outcome, STORE, table.content_hash(at), samples, 1, 900) for at, task in enumerate(tasks)
        ]
        reply = self.ask(
            Complete(
                lease_id=grant.lease_id,
                stage=grant.stage,
                incarnation=life,
                results=results,
                scalars={"reward": np.ones(samples * len(results), np.float32)} if grant.stage == "rollout" else {},
            )
        )
        refused = {refusal.task_id for refusal in reply.refused}
        for task_id, fence in tasks:
            if task_id in refused:
                continue
            assert fence == self.newest.get(task_id)  # An abandoned attempt never counts.
            if outcome == Outcome.DONE:
                keys = self.accepted.get(task_id, (fence, set()))[1] if grant.stage == "reference" else set()
                self.accepted[task_id] = (fence, keys | {key})
        self.forget_gone()

    def forget_gone(self) -> None:
        """Forget tasks that no longer count: lost attempts, dropped tasks and collected tasks."""
        for task_id, (fence, _) in list(self.accepted.items()):
            task = view.find(self.machine.run, task_id)
            if task is None or task.fence != fence or task.clears or task.lost:
                del self.accepted[task_id]

    @rule()
    def expire(self) -> None:
        self.now += LEASE_S + 1
        self.take_back(self.now)
        self.delete(self.store.room.surplus(self.now))
        self.take(self.machine.handle(Tick(), self.now))
        self.forget_gone()

    @rule(stage=st.sampled_from(sorted(KEYS)))
    def worker_dies(self, stage: str) -> None:
        self.workers[stage] += 1
        self.register(stage, self.workers[stage])
        self.forget_gone()

    @rule()
    def train(self) -> None:
        run = self.machine.run
        step = run.history.committed_step + 1
        batch = self.ask(NextBatch(driver=1, step=step))
        if not isinstance(batch, StepBatch):
            return
        tasks = [(task.task_id, task.fence) for task in batch.batch.tasks]
        assert self.batches.setdefault(step, tasks) == tasks  # The tasks of a step never change.
        self.store.locate([PutTask(*task) for task in tasks])  # By promise 1, all shards can be read.
        self.forward(tasks)
        for _ in range(2):  # The answer may be lost, so the request is sent again.
            self.ask(CommitStep(driver=1, step=step, metrics={}))
        self.publish(step)
        if batch.checkpoint_now or step % 3 == 0:
            self.checkpoints = [*self.checkpoints, step][-2:]
            self.ask(CheckpointSaved(driver=1, step=step, kept=self.checkpoints))
        self.forget_gone()

    def forward(self, tasks: list[tuple[str, int]]) -> None:
        """Put the trainer's own log-probs into the store. These puts never wait for room that cannot be freed, however
        often they are repeated.
        """
        self.life += 1
        key = f"prox:{self.life}"
        if self.put(tasks, key) == ErrorCode.BUSY:
            self.deliver_all()
            assert self.put(tasks, key) == ""
        for task_id, fence in tasks:
            mine = [key for key in self.keys_of(task_id, fence) if key.startswith("prox")]
            assert key in mine

    def keys_of(self, task_id: str, fence: int) -> set[str]:
        put_ids, [found] = self.store.locate([PutTask(task_id, fence)])
        tables = [self.files[put_ids[place]][0] for place in found]
        return {key for table in tables for key in table.checksums(table.index[task_id, fence])}

    @rule()
    def trainer_is_killed(self) -> None:
        """The trainer loads the newest checkpoint and replays the steps committed since, with the same tasks and all
        shards. If some of these shards are lost, the run returns to the checkpoint."""
        run = self.machine.run
        committed = run.history.committed_step
        loaded = self.checkpoints[-1] if self.checkpoints else 0
        whole = all(replayable(run.ledger, step) for step in range(loaded + 1, committed + 1))
        info = self.ask(GetRunInfo(driver=1, reload=True, loaded_step=loaded))
        assert isinstance(info, RunInfo)
        if not whole:
            assert info.committed_step == loaded
            self.batches = {step: tasks for step, tasks in self.batches.items() if step <= loaded}
            self.publish(loaded)
            self.forget_gone()
            return
        assert (info.committed_step, info.lineage) == (committed, run.history.lineage)
        for step in range(loaded + 1, committed + 1):
            batch = self.ask(NextBatch(driver=1, step=step))
            assert isinstance(batch, StepBatch)
            tasks = [(task.task_id, task.fence) for task in batch.batch.tasks]
            assert tasks == self.batches[step]
            for task in tasks:
                assert self.keys_of(*task) >= {"tokens", "ref"}
            self.forward(tasks)
        self.publish(committed)
        self.forget_gone()

    @precondition(lambda self: self.mail)
    @rule(data=st.data(), twice=st.booleans(), answered=st.booleans())
    def clear(self, data: st.DataObject, twice: bool, answered: bool) -> None:
        """Deliver a clear. The acknowledgement may be lost; the clear is then sent again."""
        sent = self.mail.pop(data.draw(st.integers(0, len(self.mail) - 1)))
        if twice or not answered:
            self.deliver(sent, answered=False)
        if answered:
            self.deliver(sent)
        elif sent.tracked:
            self.mail.append(sent)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), listed=st.booleans())
    def put_and_say_nothing(self, data: st.DataObject, listed: bool) -> None:
        """Put shards without completing their tasks. A worker that has lost its lease is refused."""
        grant, _ = self.grants[data.draw(st.integers(0, len(self.grants) - 1))]
        tasks = [(task.task_id, task.fence) for task in grant.batch.tasks]
        code = self.put(tasks, KEYS[grant.stage])
        assert code in ("", ErrorCode.BUSY, ErrorCode.COLLECTED)
        if self.cleared & set(tasks):
            assert code == ErrorCode.COLLECTED
        if listed:
            self.reconcile(at_once=True)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def begin_a_put(self, data: st.DataObject) -> None:
        """Begin a put. Any event may occur before the seal."""
        grant, _ = self.grants[data.draw(st.integers(0, len(self.grants) - 1))]
        tasks = [(task.task_id, task.fence) for task in grant.batch.tasks]
        if self.open_put(tasks, KEYS[grant.stage]):
            return
        put_id = self.new_put(tasks, KEYS[grant.stage])
        code = self.begin(put_id)
        assert code in ("", ErrorCode.BUSY, ErrorCode.COLLECTED)
        if self.cleared & set(tasks):
            assert code == ErrorCode.COLLECTED
        if code:
            del self.writing[put_id]

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def seal_a_put(self, data: st.DataObject) -> None:
        """Seal a put. Its lease may be alive or lost, and its grant may have been lost with an earlier life of the
        store.
        """
        put_id = data.draw(st.sampled_from(sorted(self.writing)))
        tasks = set(self.writing[put_id].tasks)
        code = self.finish(put_id)
        assert code in ("", ErrorCode.BUSY, ErrorCode.COLLECTED)
        if self.cleared & tasks:
            assert code == ErrorCode.COLLECTED

    @precondition(lambda self: self.grants)
    @rule()
    def a_lease_is_lost_between_begin_and_seal(self) -> None:
        """Lose a lease between begin and seal. The store learns of the loss first, so the late seal is refused."""
        grant, _ = self.grants[-1]
        tasks = [(task.task_id, task.fence) for task in grant.batch.tasks]
        put_id = self.open_put(tasks, KEYS[grant.stage]) or self.new_put(tasks, KEYS[grant.stage])
        began = self.begin(put_id)
        self.worker_dies(grant.stage)
        while self.mail:
            self.deliver(self.mail.pop(0))
        code = self.finish(put_id)
        self.writing.pop(put_id, None)
        assert not self.cleared & set(tasks) or code == ErrorCode.COLLECTED, (began, code)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def a_producer_is_killed(self, data: st.DataObject) -> None:
        """Kill a producer. Its put is never sealed, and the space granted to it is freed once the grant is overdue."""
        del self.writing[data.draw(st.sampled_from(sorted(self.writing)))]

    @rule(at_once=st.booleans())
    def reconcile(self, at_once: bool) -> None:
        self.list_store()
        if at_once:
            self.deliver_all()

    def list_store(self) -> None:
        page, cursor = self.store.inventory(0)
        assert cursor == 0
        hashes = [self.store.content_hashes(task) for task in page]
        self.take(self.machine.handle(Listed(STORE, page, hashes, first=True, last=True), self.now))
        self.lists = False

    @precondition(lambda self: self.files)
    @rule(data=st.data(), by_reader=st.booleans())
    def a_file_is_damaged(self, data: st.DataObject, by_reader: bool) -> None:
        """Damage a whole file. A reader reports the loss, or the next inventory shows it."""
        put_id = data.draw(st.sampled_from(sorted(self.files)))
        table = self.files[put_id][0]
        names = [PutTask(*each) for each in zip(table.task_ids, table.fences, strict=True)]
        self.retire(self.store.lose(put_id))
        self.damaged = True
        if by_reader:
            self.ask(ReportShards(store=STORE, tasks=names))
        else:
            self.list_store()
        self.damaged = False
        if self.machine.run.history.lost_version:
            assert not isinstance(
                self.ask(NextBatch(driver=1, step=self.machine.run.history.committed_step + 1)), StepBatch
            )
            self.ask(GetRunInfo(driver=1))
            self.publish(self.machine.run.history.committed_step)
        self.forget_gone()

    @rule()
    def last_mappings_go(self) -> None:
        for target in list(self.zombies):
            _, nbytes = self.zombies.pop(target)
            if self.store.room.keep(target, self.now):
                self.spares[target] = nbytes
            else:
                self.store.room.reaped(target)

    @rule()
    def store_is_killed(self) -> None:
        self.life += 1
        self.store = StoreState(STORE, LIMIT, self.life, SPILL)
        former = list(self.zombies.items())
        self.zombies.clear()
        self.store.recall([PutTask(task_id, fence) for task_id, fence in self.tombs.items()])
        for put_id, (table, nbytes, place) in list(self.files.items()):
            self.retire(self.store.recover(put_id, nbytes, table, place))
        refused = [(f"{put_id}.tmp", Tier.MEMORY, held_bytes(nbytes)) for put_id, nbytes in self.granted.items()]
        refused += [(name, Tier.MEMORY, nbytes) for name, nbytes in self.spares.items()]
        refused += [(name, *held) for name, held in former]
        for name, place, nbytes in refused:
            self.zombies[self.store.recover_refuse(name, nbytes, place).target] = (place, nbytes)
        self.granted.clear()
        self.spares.clear()
        self.register_store()

    @rule(whole=st.booleans())
    def scheduler_is_killed(self, whole: bool) -> None:
        """Restart the scheduler from the journal alone, or from the last snapshot and the events after it."""
        before = run_state.dump(self.machine.run)
        self.machine = Scheduler(PLAN, lease_s=LEASE_S, incarnation=self.machine.incarnation + 1)
        if whole and self.kept is not None:
            self.machine.run = run_state.load(PLAN, self.kept)
            rest = self.journal[self.kept_at :]
        else:
            rest = self.journal
        for event in rest:
            self.machine.replay(event)
        assert run_state.dump(self.machine.run) == before
        self.mail.clear()  # Messages that were in transit are requested again.
        self.take(self.machine.begin(CONFIG, self.now))

    @rule()
    def everything_is_killed(self) -> None:
        """Resume the run with empty stores.

        The run returns to its checkpoint and trains the steps after it again, on the same tasks and before any other
        tasks.
        """
        loaded = self.checkpoints[-1] if self.checkpoints else 0
        again = [task_id for step, tasks in self.batches.items() if step > loaded for task_id, _ in tasks]
        self.life += 1
        self.data_id = f"{self.life}"
        self.store = StoreState(STORE, LIMIT, self.life, SPILL)
        for kept in (self.files, self.granted, self.spares, self.zombies, self.tombs, self.writing, self.accepted):
            kept.clear()
        self.cleared.clear()
        self.grants.clear()
        self.scheduler_is_killed(whole=False)
        self.register_store()
        for service in self.workers:
            self.workers[service] += 1
            self.register(service, self.workers[service])
        assert self.ask(GetRunInfo(driver=1)).committed_step == loaded
        run = self.machine.run
        self.batches = {step: tasks for step, tasks in self.batches.items() if step <= loaded}
        first = view.live_ids(run)[: len(again)]
        assert first == again[: len(first)]
        assert first or not again
        self.publish(loaded)

    @rule()
    def snapshot_is_taken(self) -> None:
        self.kept = run_state.dump(self.machine.run)
        self.kept_at = len(self.journal)

    @rule()
    def a_worker_of_another_run_puts(self) -> None:
        """Put shards of a task that this scheduler never leased."""
        code = self.put([("train/9/9", 1)], "tokens")
        assert code in ("", ErrorCode.BUSY, ErrorCode.COLLECTED)

    # ---- invariants

    @invariant()
    def accepted_shards_can_be_read(self) -> None:
        """Check promise 1 and the first half of promise 3."""
        for task_id, (fence, keys) in self.accepted.items():
            assert self.keys_of(task_id, fence) >= keys

    @invariant()
    def what_was_cleared_stays_away(self) -> None:
        """Check the second half of promise 3, and that late puts are refused in every life of the store."""
        for task in [PutTask(*each) for each in self.cleared]:
            with pytest.raises(RpcError, match="were collected"):
                self.store.locate([task])

    @invariant()
    def the_store_holds_nothing_that_was_cleared_or_collected(self) -> None:
        """Check that the store has no shards of a collected task: COLLECTED means that it has deleted them."""
        page, _ = self.store.inventory(0)
        for entry in page:
            assert self.tombs.get(entry.task_id, 0) < entry.fence
            if entry.task_id in self.newest:
                assert view.find(self.machine.run, entry.task_id) is not None

    @invariant()
    def every_task_is_trained_once(self) -> None:
        """Check promise 2: no task is in two steps, and committed steps do not change."""
        trained = [task_id for tasks in self.batches.values() for task_id, _ in tasks]
        assert len(trained) == len(set(trained))
        assert len(self.batches) >= self.machine.run.history.committed_step

    @invariant()
    def nothing_that_is_leased_is_cleared(self) -> None:
        """Check promise 3."""
        for task in view.leased(self.machine.run):
            assert self.tombs.get(task.task_id, 0) < task.fence

    @invariant()
    def bytes_stay_within_their_limits(self) -> None:
        """Check promise 4."""
        assert self.store.room.used[Tier.MEMORY] <= LIMIT
        assert self.store.room.used[Tier.DISK] <= SPILL

    @invariant()
    def bytes_are_those_of_the_files(self) -> None:
        """Check that the counted bytes equal those of all files (sealed, unsealed, mapped collected and kept), in every
        life of the store."""
        stats = self.store.stats()
        assert stats.files == len(self.files)
        assert stats.zombie_bytes == sum(nbytes for _, nbytes in self.zombies.values())
        assert stats.spare_bytes == sum(self.spares.values())
        sealed = sum(held_bytes(nbytes) for _, nbytes, _ in self.files.values())
        granted = sum(map(held_bytes, self.granted.values()))
        assert stats.bytes == sealed + granted + stats.zombie_bytes + stats.spare_bytes

    @invariant()
    def the_durable_state_is_valid(self) -> None:
        """Check counts, waiting tasks, and the bytes on which admission and early checkpoints depend."""
        view.validate(self.machine.run)

    def teardown(self) -> None:
        """Check at the end, when all processes are alive, that the store has only shards that the scheduler wants."""
        self.expire()
        self.deliver_all()
        self.reconcile(at_once=True)
        page, _ = self.store.inventory(0)
        for entry in page:
            if not entry.task_id.startswith("weights/"):
                task = view.find(self.machine.run, entry.task_id)
                assert task is not None
                assert task.fence == entry.fence
                assert task.made  # Every lease has expired, so each task still in the store has an accepted result.
        assert not any(self.machine.run.shards.clears.queues.values())
        self.last_mappings_go()
        assert not self.granted
        assert self.store.stats().zombie_bytes == 0
        self.bytes_are_those_of_the_files()
        self.small.stop()


TestStoreAndScheduler = Both.TestCase
TestStoreAndScheduler.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
