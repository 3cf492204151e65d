"""Newer weights for running samples: each token keeps the version that sampled it, whenever the weights arrive; leases
of one exact version are left alone; weights that fail verification sample no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from proto.messages import BatchMeta, ErrorCode, LeaseGrant, TaskHandle, WeightsRef
from services.rollout.answers import AnswerSampler
from services.rollout.engine import GenerationWatch
from services.rollout.in_flight import InFlight
from services.rollout.partial import Completion, PartialJournal, ResumableNotes
from services.rollout.rewards.pool import RewardPool
from services.rollout.tasks import PreparedTasks, ReadyTask
from services.rollout.transfer import TransferFailed
from services.rollout.version_loader import Fetched
from services.rollout.versions import BlockVersions
from services.rollout.weights_source import Arrays, Entry, Loaded, ShardSource
from services.rollout.weights_sync import WeightsSync
from services.rollout.worker import RolloutWorker, _Prepared
from shared.colocation.turns import OwnDevices
from shared.dataplane.stream import OnProgress, ignore_progress
from shared.lease import Lease, LeaseLost
from shared.rpc.errors import RpcError
from shared.topology.schema import RewardRetry
from tests.unit.rollout.rollout_engine import sampling
from tests.unit.rollout.told_engine import ToldEngine, ToldWeights, ref_of, weights_of

FIRST = 4
NEW_TOKENS, SAMPLES, TEMPERATURE = 8, 2, 1.0
NOTED, FRESH = "train/0/0", "train/0/1"


class Rig:
    """An engine that holds version FIRST, with everything that brings it newer versions."""

    def __init__(self) -> None:
        self.engine = ToldEngine()
        self.sync = WeightsSync(self.engine, "rollout/0", lambda topic, values: None)
        self.told: list[str] = []
        self.in_flight = InFlight(
            self.engine,
            self.sync,
            ShardSource(ToldWeights()),  # type: ignore[arg-type]
            lambda topic, values: self.told.append(topic),
        )
        self.running = asyncio.create_task(self.in_flight.run())

    async def swapped(self, step: int) -> None:
        """Swap the engine to version `step`."""
        before = len(self.told)
        self.in_flight.announce(ref_of(step))
        while len(self.told) == before:
            await asyncio.sleep(0)
        assert self.sync.holds.step == step

    async def swapped_to(self, step: int) -> None:
        while self.sync.holds.step != step or self.engine.is_held:
            await asyncio.sleep(0)

    async def sample(self, journal: PartialJournal, ids: list[str]) -> dict[str, list[Completion]]:
        sampler = AnswerSampler(self.engine, journal)
        versions = self.in_flight.begin(self.sync.holds.step, exact=False)
        groups = await sampler.sample(lease(ids), tasks(ids), versions, 0)
        self.in_flight.end(versions)
        return dict(zip(ids, groups, strict=True))


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.sync.load(ref_of(FIRST), weights_of(FIRST))
    try:
        yield made
    finally:
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


def lease(ids: list[str], *, exact: bool = False) -> Lease:
    grant = LeaseGrant(
        lease_id=1,
        stage="rollout",
        split="train",
        lease_s=30,
        batch=BatchMeta(tasks=[TaskHandle(each, 1) for each in ids]),
        min_step=FIRST if exact else 0,
        exact=exact,
        group_size=SAMPLES,
        block_rows=0,
    )
    return Lease(grant, lambda: 0)


def tasks(ids: list[str]) -> PreparedTasks:
    ready = [ReadyTask(TaskHandle(each, 1), {}, [1, 2, 3]) for each in ids]
    return PreparedTasks(ready, [], sampling(SAMPLES, TEMPERATURE, NEW_TOKENS), 2)


def note(folder: Path, task_id: str, versions: list[int]) -> None:
    """Write a note to the journal as an earlier incarnation would."""
    ids = np.array(versions, np.int32)
    answer = Completion(ids, np.full(len(ids), -1.0, np.float32), ids, "")
    journal = PartialJournal(folder, 1e9)
    journal.note({task_id: [answer] * SAMPLES}, 0, TEMPERATURE)
    journal.close()


def versions_of(answers: dict[str, list[Completion]]) -> dict[str, list[int]]:
    """Return the token versions by task, after a check that each equals the version that the token itself tells."""
    for group in answers.values():
        for each in group:
            assert each.versions.tolist() == each.token_ids.tolist()
            assert each.finish_reason == "length"
    return {task_id: group[0].versions.tolist() for task_id, group in answers.items()}


def test_tokens_of_both_parts_of_a_lease_carry_their_version_when_weights_change_in_the_first(tmp_path: Path) -> None:
    async def scenario() -> dict[str, list[Completion]]:
        async with rig() as made:
            note(tmp_path, NOTED, [3, FIRST])
            journal = PartialJournal(tmp_path, 1e9)

            async def before_step(number: int) -> None:
                if number in (3, NEW_TOKENS + 3):  # one step of the tasks without notes, then one of those with
                    await made.swapped(made.sync.holds.step + 1)

            made.engine.before_step = before_step
            return await made.sample(journal, [NOTED, FRESH])

    assert versions_of(asyncio.run(scenario())) == {
        FRESH: [4, 4, 5, 5, 5, 5, 5, 5],
        NOTED: [3, 4, 5, 5, 6, 6, 6, 6],
    }


def test_tokens_carry_their_version_when_weights_change_while_notes_are_read(tmp_path: Path) -> None:
    async def scenario() -> dict[str, list[Completion]]:
        async with rig() as made:
            loop = asyncio.get_running_loop()

            class SlowJournal(PartialJournal):
                def read(self, task_id: str, wanted: ResumableNotes) -> list[Completion] | None:
                    asyncio.run_coroutine_threadsafe(made.swapped(made.sync.holds.step + 1), loop).result(30)
                    return super().read(task_id, wanted)

            return await made.sample(SlowJournal(tmp_path, 1e9), [FRESH])

    assert versions_of(asyncio.run(scenario())) == {FRESH: [FIRST + 1] * NEW_TOKENS}


def test_notes_carry_the_version_of_each_token(tmp_path: Path) -> None:
    async def scenario() -> list[Completion] | None:
        async with rig() as made:
            journal = PartialJournal(tmp_path, 1e9)

            async def before_step(number: int) -> None:
                if number == 3:
                    await made.swapped(FIRST + 2)

            made.engine.before_step = before_step
            await made.sample(journal, [FRESH])
            journal.close()
            return journal.read(FRESH, ResumableNotes(SAMPLES, NEW_TOKENS, TEMPERATURE, 0, 0, 100))

    noted = asyncio.run(scenario())
    assert noted is not None
    assert [each.versions.tolist() for each in noted] == [[4, 4, 6, 6, 6, 6, 6, 6]] * SAMPLES


def test_weights_that_fail_verification_sample_no_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig() as made:
            shown: list[int] = []
            cancel = lease([FRESH]).cancel

            async def before_step(number: int) -> None:
                if number == 3:
                    made.in_flight.announce(ref_of(FIRST + 1, canary=FIRST + 1.5))
                    await asyncio.wait([made.running])

            made.engine.before_step = before_step
            versions = made.in_flight.begin(FIRST, exact=False)
            watch = GenerationWatch(0.0, lambda groups: shown.append(len(groups[0][0].token_ids)))
            prompts = [each.prompt() for each in tasks([FRESH]).ready]
            block = asyncio.create_task(made.engine.generate(prompts, tasks([FRESH]).sampling, cancel, watch))
            with pytest.raises(RpcError, match="canary mismatch after version 5") as failed:
                await made.running
            assert failed.value.code == ErrorCode.CONFLICT
            for _ in range(100):
                await asyncio.sleep(0)
            assert made.engine.is_held
            assert not block.done()
            assert shown == [1, 2]
            assert made.sync.holds.step == -1
            assert versions.of(np.array([made.engine.swaps - 1], np.int32)).tolist() == [FIRST]
            with pytest.raises(ValueError, match="versions are known"):
                versions.of(np.array([made.engine.swaps], np.int32))
            block.cancel()

    asyncio.run(scenario())


def worker_of(made: Rig, *, workflow: Any = None, source: Any = None) -> RolloutWorker:
    service = SimpleNamespace(telemetry=SimpleNamespace(span=lambda name, seconds: None))
    return RolloutWorker(
        service,  # type: ignore[arg-type]
        engine=made.engine,
        sync=made.sync,
        tasks=None,  # type: ignore[arg-type]
        rewards=RewardPool(
            [], timeout_s=10, memory_bytes=1 << 30, processes=1, retry=RewardRetry(), emit=lambda topic, values: None
        ),
        workflow=workflow,
        answers=AnswerSampler(made.engine, None),
        data=None,  # type: ignore[arg-type]
        source=source,
        in_flight=made.in_flight,
        turns=OwnDevices(),
        store="batch-store/0",
        block_tasks=1,
        filters=False,
        on_text=None,  # type: ignore[arg-type]
    )


async def announce_always(made: Rig) -> None:
    """Announce newer weights before each step, and give them time to be loaded."""

    async def before_step(_: int) -> None:
        made.in_flight.announce(ref_of(made.sync.holds.step + 1))
        for _ in range(20):
            await asyncio.sleep(0)

    made.engine.before_step = before_step


@pytest.mark.parametrize("exact", [True, False])
def test_a_lease_of_one_exact_version_is_sampled_by_that_one_to_its_end(exact: bool) -> None:
    """A lease that is not exact is sampled by several versions, which shows that the test can fail."""

    async def scenario() -> set[int]:
        async with rig() as made:
            await announce_always(made)
            sampled = await worker_of(made)._sample(lease([FRESH], exact=exact), _Prepared(tasks([FRESH]), Fetched()))
            assert sampled is not None
            (sequence,) = sampled.made[0][0].rolled.sequences
            assert sequence.versions[3:].tolist() == sequence.token_ids[3:].tolist()
            return set(sequence.versions[3:].tolist())

    assert (asyncio.run(scenario()) == {FIRST}) == exact


def test_the_calls_of_a_workflow_are_sampled_by_one_version() -> None:
    class Calls:
        """Two calls of the policy, one after the other."""

        generate_s = 0.0

        def __init__(self, made: Rig) -> None:
            self._engine = made.engine
            self.versions: list[int] = []

        async def run(self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions) -> list[list[Any]]:
            for _ in range(2):
                groups = await self._engine.generate([tasks.ready[0].prompt()], tasks.sampling, lease.cancel)
                self.versions += versions.of(groups[0][0].swaps).tolist()
                assert self.versions[-NEW_TOKENS:] == groups[0][0].token_ids.tolist()
            return []

    async def scenario() -> list[int]:
        async with rig() as made:
            await announce_always(made)
            calls = Calls(made)
            await worker_of(made, workflow=calls)._sample(lease([FRESH]), _Prepared(tasks([FRESH]), Fetched()))
            return calls.versions

    assert asyncio.run(scenario()) == [FIRST] * 2 * NEW_TOKENS


def test_leases_sampled_side_by_side_both_continue_under_newer_weights(tmp_path: Path) -> None:
    async def scenario() -> list[dict[str, list[Completion]]]:
        async with rig() as made:
            journal, both, swapped = PartialJournal(tmp_path, 1e9), asyncio.Barrier(2), asyncio.Event()

            async def before_step(number: int) -> None:
                if number <= 4:  # until each lease has a token
                    await both.wait()
                elif number == 5:
                    await made.swapped(made.sync.holds.step + 1)
                    swapped.set()
                else:
                    await swapped.wait()

            made.engine.before_step = before_step
            return await asyncio.gather(made.sample(journal, [NOTED]), made.sample(journal, [FRESH]))

    first, second = (versions_of(each) for each in asyncio.run(scenario()))
    for versions in (first[NOTED], second[FRESH]):
        assert set(versions) == {FIRST, FIRST + 1}
        assert versions == sorted(versions)


def test_a_lease_that_needs_other_weights_waits_for_running_leases_or_a_swap() -> None:
    async def scenario() -> list[str]:
        async with rig() as made:
            order: list[str] = []
            versions = made.in_flight.begin(FIRST, exact=False)

            async def waits(what: str, met: Callable[[], bool]) -> None:
                async with made.in_flight.settled(lambda: made.in_flight.is_quiet or met()):
                    order.append(what)

            for_swap = asyncio.create_task(waits("swap", lambda: made.sync.holds.step > FIRST))
            for_end = asyncio.create_task(waits("end", lambda: False))
            await asyncio.sleep(0)
            assert not order
            await made.swapped(FIRST + 1)
            await for_swap
            assert order == ["swap"]
            made.in_flight.end(versions)
            await for_end
            return order

    assert asyncio.run(scenario()) == ["swap", "end"]


def test_a_lease_of_one_version_beside_others_keeps_newer_weights_from_all_of_them() -> None:
    async def scenario() -> None:
        async with rig() as made:
            other = made.in_flight.begin(FIRST, exact=False)
            exact = made.in_flight.begin(FIRST, exact=True)
            made.in_flight.announce(ref_of(FIRST + 1))
            for _ in range(50):
                await asyncio.sleep(0)
            assert made.sync.holds.step == FIRST
            made.in_flight.end(exact)
            await made.swapped(FIRST + 1)
            made.in_flight.end(other)

    asyncio.run(scenario())


class Lost:
    """Weights whose transfer fails."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    async def begin(self) -> None:
        """Accept the transfer."""

    def decline(self) -> None:
        raise AssertionError("they were wanted")

    async def load(self, engine: Any) -> Loaded:
        raise TransferFailed("the sender is gone")


class Source:
    """The trainer is unreachable and the store is reachable."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def fetch(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Lost:
        return Lost(self._entry)

    async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Arrays:
        return Arrays(weights_of(ref.step))


def lease_of(step: int) -> Lease:
    made = lease([FRESH])
    grant = msgspec.structs.replace(made.grant, weights=ref_of(step), min_step=step)
    return Lease(grant, lambda: 0)


async def announced_at_step_3(made: Rig, folder: Path) -> dict[str, list[Completion]]:
    async def before_step(number: int) -> None:
        if number == 3:
            made.in_flight.announce(ref_of(FIRST + 1))
        for _ in range(20):
            await asyncio.sleep(0)

    made.engine.before_step = before_step
    return await made.sample(PartialJournal(folder, 1e9), [FRESH])


def test_a_failed_transfer_falls_back_to_the_store(tmp_path: Path) -> None:
    async def scenario() -> dict[str, list[Completion]]:
        async with rig() as made:
            made.in_flight._source = Source(Entry.SET)
            return await announced_at_step_3(made, tmp_path)

    [versions] = versions_of(asyncio.run(scenario())).values()
    assert versions == [FIRST] * 2 + [FIRST + 1] * (NEW_TOKENS - 2)


def test_an_update_by_an_undrilled_entry_leaves_a_running_lease_unchanged(tmp_path: Path) -> None:
    async def scenario() -> dict[str, list[Completion]]:
        async with rig() as made:
            made.in_flight._source = Source(Entry.RECEIVE)
            swaps = made.engine.swaps
            answers = await announced_at_step_3(made, tmp_path)
            assert made.sync.holds.step == FIRST
            assert made.engine.swaps == swaps  # no drill of that entry was begun during sampling
            return answers

    assert versions_of(asyncio.run(scenario())) == {FRESH: [FIRST] * NEW_TOKENS}


class Silent(Lost):
    """Weights of a sender that does not answer."""

    def __init__(self) -> None:
        super().__init__(Entry.SET)
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def begin(self) -> None:
        self.asked.set()
        await self.given_up.wait()
        raise TransferFailed("no answer")


def test_sampling_continues_while_the_trainer_is_asked_and_it_is_not_asked_again_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig() as made:
            silent = Silent()
            source = Source(Entry.SET)
            source.fetch = lambda ref: _ready(silent)  # type: ignore[assignment,method-assign,return-value]
            made.in_flight._source = source
            held: list[bool] = []

            async def before_step(number: int) -> None:
                if number == 2:
                    made.in_flight.announce(ref_of(FIRST + 1))
                    await silent.asked.wait()
                held.append(made.engine.is_held)
                if number == 5:
                    silent.given_up.set()
                    await made.swapped_to(FIRST + 1)
                    silent.asked.clear()
                    made.in_flight.announce(ref_of(FIRST + 2))
                    await made.swapped_to(FIRST + 2)

            made.engine.before_step = before_step
            answers = await made.sample(PartialJournal(tmp_path, 1e9), [FRESH])
            assert not any(held)
            assert versions_of(answers) == {FRESH: [FIRST] * 4 + [FIRST + 2] * (NEW_TOKENS - 4)}
            assert not silent.asked.is_set()

    asyncio.run(scenario())


async def _ready(delivery: Silent) -> Silent:
    return delivery


@pytest.mark.parametrize("entry", list(Entry))
def test_a_lease_whose_weights_are_not_sent_gets_them_from_the_store(entry: Entry) -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(entry))
            sampled = await worker._sample(lease_of(FIRST + 2), _Prepared(tasks([FRESH]), Fetched()))
            assert sampled is not None
            assert (sampled.version, made.sync.holds.step) == (FIRST + 2, FIRST + 2)

    asyncio.run(scenario())


def test_a_lease_that_waits_for_others_shares_their_progress_and_can_be_given_up_at_once() -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(Entry.SET))
            under_way, waits = lease([NOTED], exact=True), lease_of(FIRST + 1)
            worker.leases._held = {1: under_way, 2: waits}
            other = made.in_flight.begin(FIRST, exact=True)
            waiting = asyncio.create_task(worker._sample(waits, _Prepared(tasks([FRESH]), Fetched())))
            for _ in range(20):
                await asyncio.sleep(0)
            assert worker.leases.queued == {waits}
            worker.leases.progress()
            before = waits.progress
            worker.leases.progress()
            assert waits.progress == before  # neither lease makes progress
            under_way.advance()
            worker.leases.progress()
            assert waits.progress > before
            waits.give_up()
            with pytest.raises(LeaseLost):
                await asyncio.wait_for(waiting, 10)
            assert not worker.leases.queued
            made.in_flight.end(other)

    asyncio.run(scenario())


def test_a_lease_that_waits_for_a_load_shares_its_progress_and_can_be_given_up_at_once() -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(Entry.SET))
            loads, waits = lease([NOTED]), lease_of(FIRST + 1)
            worker.leases._held = {1: loads, 2: waits}
            async with made.in_flight.settled():
                waiting = asyncio.create_task(worker._sample(waits, _Prepared(tasks([FRESH]), Fetched())))
                for _ in range(20):
                    await asyncio.sleep(0)
                worker.leases.progress()
                before = waits.progress
                loads.advance()
                worker.leases.progress()
                assert waits.progress > before
                waits.give_up()
                with pytest.raises(LeaseLost):
                    await asyncio.wait_for(waiting, 10)

    asyncio.run(scenario())


def test_a_lease_lost_while_it_is_scored_uses_no_more_time() -> None:
    class Rewards:
        """Reward functions that never return."""

        async def score(self, groups: list[Any], advance: Callable[[], None]) -> list[Any]:
            await asyncio.Event().wait()
            return groups

    async def scenario() -> None:
        async with rig() as made:
            worker, lost = worker_of(made), lease([FRESH])
            worker._rewards = Rewards()  # type: ignore[assignment]
            scoring = asyncio.create_task(worker._scores(lost, []))
            await asyncio.sleep(0)
            lost.give_up()
            with pytest.raises(LeaseLost):
                await asyncio.wait_for(scoring, 10)

    asyncio.run(scenario())


def test_an_engine_that_hangs_in_an_update_of_running_samples_ends_the_service() -> None:
    """A lease that waits for other weights meanwhile does not prevent that."""

    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Source(Entry.SET))
            worker._service.log = structlog.get_logger()
            held = [lease([NOTED]), lease_of(FIRST + 2)]
            for each in held:
                each.grant = msgspec.structs.replace(each.grant, lease_s=0.1)
            ahead = list(held)

            async def acquire() -> Lease:
                if not ahead:
                    await asyncio.Event().wait()
                return ahead.pop(0)

            async def prepare(lease: Lease) -> _Prepared:
                return _Prepared(tasks([each.task_id for each in lease.grant.batch.tasks]), Fetched())

            async def before_step(number: int) -> None:
                if number == 3:
                    made.in_flight.announce(ref_of(FIRST + 1))
                    await asyncio.sleep(0)

            async def hang(weights: dict[str, Any]) -> None:
                held[0].give_up()
                await asyncio.Event().wait()

            made.engine.before_step = before_step
            made.engine.set_weights = hang  # type: ignore[method-assign]
            worker._pipeline._acquire, worker._pipeline._prepare = acquire, prepare
            async with asyncio.timeout(20):
                with pytest.raises(RpcError, match="it hangs"):
                    await worker.run()

    asyncio.run(scenario())


class Cleared(Source):
    """The trainer is unreachable, and the store has collected the version."""

    async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Arrays:
        raise RpcError(ErrorCode.MISSING, "collected")


def test_a_lease_whose_version_was_collected_is_handed_back_and_the_engine_continues() -> None:
    async def scenario() -> None:
        async with rig() as made:
            worker = worker_of(made, source=Cleared(Entry.SET))
            back: list[bool] = []

            async def hand_back(lease: Lease, why: str, *, untouched: bool = False) -> None:
                assert "waited for longer than its version lasted" in why
                back.append(untouched)

            worker.leases.hand_back = hand_back  # type: ignore[method-assign]
            assert await worker._sample(lease_of(FIRST + 2), _Prepared(tasks([FRESH]), Fetched())) is None
            assert back == [True]
            worker._versions._source = Source(Entry.SET)
            sampled = await worker._sample(lease_of(FIRST + 3), _Prepared(tasks([FRESH]), Fetched()))
            assert sampled is not None
            assert sampled.version == FIRST + 3

    asyncio.run(scenario())


def test_weights_that_no_drilled_entry_can_load_are_not_fetched_during_sampling(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig() as made:
            brought: list[int] = []

            class FromStore(Source):
                async def from_store(self, ref: WeightsRef, on_progress: OnProgress = ignore_progress) -> Arrays:
                    brought.append(ref.step)
                    return await super().from_store(ref, on_progress)

            made.sync._drilled = {Entry.RECEIVE}
            made.in_flight._source = FromStore(Entry.RECEIVE)
            await announced_at_step_3(made, tmp_path)
            assert made.sync.holds.step == FIRST
            assert not brought

    asyncio.run(scenario())
