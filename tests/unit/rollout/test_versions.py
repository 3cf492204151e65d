"""Tests what happens when running samples get newer weights: each token keeps the version that sampled it, whenever the
weights arrive; leases of one exact version are not affected; no token is sampled with weights that fail verification.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.messages import ErrorCode
from services.rollout.engine import GenerationWatch
from services.rollout.sampling.answers import PartialJournal, ResumableNotes
from services.rollout.sampling.tasks import PreparedTasks
from services.rollout.sampling.trajectory import BlockVersions, Completion
from shared.lease import Lease
from shared.rpc.errors import RpcError
from tests.unit.rollout.told_engine import ref_of
from tests.unit.rollout.versions_rig import (
    FIRST,
    FRESH,
    NEW_TOKENS,
    NOTED,
    SAMPLES,
    TEMPERATURE,
    Rig,
    lease,
    note,
    rig,
    tasks,
    versions_of,
    worker_of,
)


def test_tokens_of_both_parts_of_a_lease_carry_their_version_when_weights_change_during_the_first_part(
    tmp_path: Path,
) -> None:
    async def scenario() -> dict[str, list[Completion]]:
        async with rig() as made:
            note(tmp_path, NOTED, [3, FIRST])
            journal = PartialJournal(tmp_path, 1e9)

            async def before_step(number: int) -> None:
                # A step for the tasks without notes is followed by a step for those with notes.
                if number in (3, NEW_TOKENS + 3):
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


def test_notes_contain_the_version_of_each_token(tmp_path: Path) -> None:
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


def test_no_token_is_sampled_with_weights_that_fail_verification(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig() as made:
            shown: list[int] = []
            cancel = lease([FRESH]).cancel

            async def before_step(number: int) -> None:
                if number == 3:
                    made.versions.announce(ref_of(FIRST + 1, canary=FIRST + 1.5))
                    await asyncio.wait([made.running])

            made.engine.before_step = before_step
            versions = made.begin(exact=False)
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
            with pytest.raises(ValueError, match="versions are known only"):
                versions.of(np.array([made.engine.swaps], np.int32))
            block.cancel()

    asyncio.run(scenario())


async def announce_always(made: Rig) -> None:
    """Announce newer weights before each step, and give them time to be loaded."""

    async def before_step(_: int) -> None:
        made.versions.announce(ref_of(made.sync.holds.step + 1))
        for _ in range(20):
            await asyncio.sleep(0)

    made.engine.before_step = before_step


@pytest.mark.parametrize("exact", [True, False])
def test_a_lease_of_one_exact_version_is_sampled_by_that_version_to_the_end(exact: bool) -> None:
    """A lease that is not exact is sampled by several versions, which shows that the test can fail."""

    async def scenario() -> set[int]:
        async with rig() as made:
            await announce_always(made)
            sampled = await worker_of(made)._sample(lease([FRESH], exact=exact), tasks([FRESH]))
            assert sampled is not None
            (sequence,) = sampled.made[0][0].sequences
            assert sequence.versions[3:].tolist() == sequence.token_ids[3:].tolist()
            return set(sequence.versions[3:].tolist())

    assert (asyncio.run(scenario()) == {FIRST}) == exact


def test_the_calls_of_a_workflow_are_sampled_by_one_version() -> None:
    class Calls:
        """Two calls to the policy, one after the other."""

        generate_s, lost_processes = 0.0, 0

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
            await worker_of(made, workflow=calls)._sample(lease([FRESH]), tasks([FRESH]))
            return calls.versions

    assert asyncio.run(scenario()) == [FIRST] * 2 * NEW_TOKENS


def test_leases_sampled_side_by_side_both_continue_under_newer_weights(tmp_path: Path) -> None:
    async def scenario() -> list[dict[str, list[Completion]]]:
        async with rig() as made:
            journal, both, swapped = PartialJournal(tmp_path, 1e9), asyncio.Barrier(2), asyncio.Event()

            async def before_step(number: int) -> None:
                if number <= 4:  # Each lease gets a token.
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
            versions = made.begin(exact=False)

            async def waits(what: str, met: Callable[[], bool]) -> None:
                async with made.versions._settled(lambda: not made.versions._sampled or met()):
                    order.append(what)

            for_swap = asyncio.create_task(waits("swap", lambda: made.sync.holds.step > FIRST))
            for_end = asyncio.create_task(waits("end", lambda: False))
            await asyncio.sleep(0)
            assert not order
            await made.swapped(FIRST + 1)
            await for_swap
            assert order == ["swap"]
            made.end(versions)
            await for_end
            return order

    assert asyncio.run(scenario()) == ["swap", "end"]


def test_newer_weights_wait_for_a_lease_of_one_exact_version_even_if_other_leases_run() -> None:
    async def scenario() -> None:
        async with rig() as made:
            other = made.begin(exact=False)
            exact = made.begin(exact=True)
            made.versions.announce(ref_of(FIRST + 1))
            for _ in range(50):
                await asyncio.sleep(0)
            assert made.sync.holds.step == FIRST
            made.end(exact)
            await made.swapped(FIRST + 1)
            made.end(other)

    asyncio.run(scenario())
