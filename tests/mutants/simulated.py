"""Lists defects that the simulation finds: rules of the whole system, each broken in one place."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.bus import BUS
from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise
from tests.mutants.scheduler import SCHEDULER
from tests.mutants.store import STORE
from tests.mutants.trainer import TRAINER

SEEDS = "tests/sim/test_simulation.py::test_every_promise_is_kept_in_every_simulated_run"

_ALSO = frozenset(
    {
        "a completion is accepted from another life of the lease holder",
        "a retried lease request is given a second lease",
        "admission goes one step further than staleness allows",
        "a task may be sampled with a version that is one step too old",
        "a step that is requested again gets different tasks",
        "tasks are collected before the oldest kept checkpoint covers them",
        "reconciliation clears leased or accepted shards",
        "a change to the state is not journaled",
        "a reply is sent before its decision is in the journal",
        "a retry of an answered request is executed again",
        "a retry of a request in progress is executed concurrently",
        "the next attempt of a task keeps the previous fence",
        "calls of a replaced driver are executed",
        "a restarted store forgets its tombstones",
        "a late result under a lower fence is accepted",
        "a step that was committed is committed again",
        "a tombstone is written after the clear",
    }
)
"""Mutations that have their own test and that the simulation also finds."""

SIMULATED = [
    *(
        replace(each, name=f"{each.name}, in a simulated run", test=SEEDS)
        for each in (*SCHEDULER, *STORE, *BUS, *TRAINER)
        if each.name in _ALSO
    ),
    Mutation(
        "a clear is acknowledged without a tombstone",
        Promise.COLLECTED,
        "services/batch_store/server.py",
        "files.tombstones.append(self.index.entomb(request.tasks))",
        "self.index.entomb(request.tasks)",
        SEEDS,
    ),
    Mutation(
        "the batch of a step is not journaled",
        Promise.ONCE,
        "services/scheduler/state.py",
        "found = batch(self.run, request) or self._durable(request)",
        "found = batch(self.run, request) or self.run.apply(request)",
        SEEDS,
    ),
    Mutation(
        "a driver continues with workers that are not at the committed step",
        Promise.ONCE,
        "services/policy_trainer/resume.py",
        "    if not state.dirty and state.step == info.committed_step:\n",
        "    if not state.dirty:\n",
        SEEDS,
    ),
    Mutation(
        "a rank that withdraws from a round gets no answer to its pending request",
        Promise.DEADLINES,
        "shared/ranks/rendezvous.py",
        "current.waiting.setdefault(request.rank, []).append(answer)",
        "current.waiting[request.rank] = [answer]",
        "tests/unit/shared/test_dispatch_rendezvous.py::"
        "test_a_rank_that_withdraws_from_a_round_gets_the_answer_to_its_pending_request",
    ),
]
