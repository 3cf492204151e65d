"""Lets colocated processes request devices, work, die and hang at any moment.

Checks that no forbidden combination of parts is ever on the devices and that every process finishes its work.
"""

from __future__ import annotations

import random
import re
from collections.abc import Set
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import DeviceOrder, Heartbeat, HoldDevices, Register
from services.scheduler.devices import DeviceTurns
from services.scheduler.events import Answer, Effect, Fail, KillProcess, TellDevices
from shared.colocation.devices import (
    ALL_AT_ONCE,
    FORBIDDEN,
    GRADIENTS,
    KV_CACHE,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    REFERENCE,
    WEIGHTS,
    DeviceLedger,
    ForbiddenPair,
    Holder,
    Holding,
    Parts,
    trained_parts,
)
from shared.rpc.errors import RpcError
from shared.topology.models import CRITIC, POLICY, WORKERS

WORKER, SCORER, ENGINE = WORKERS[POLICY], "reference", "rollout"
CRITIC_PARTS = trained_parts(CRITIC)


def turns_of(model: str) -> list[list[Parts]]:
    """Return the turns of a trained model: a forward pass, an update, and a checkpoint."""
    parameters, gradients, optimizer = trained_parts(model)
    update = [
        frozenset({parameters}),
        frozenset({parameters, gradients}),
        frozenset({parameters, gradients, optimizer}),
    ]
    return [[frozenset({parameters})], update, [frozenset({parameters, optimizer})]]


TURNS: dict[str, list[list[Parts]]] = {
    **{service: turns_of(model) for model, service in WORKERS.items()},
    SCORER: [[frozenset({REFERENCE})]],
    ENGINE: [[frozenset({WEIGHTS}), frozenset({WEIGHTS, KV_CACHE})], [frozenset({WEIGHTS, KV_CACHE})]],
}
LIMIT_S = 5.0
POLL_S = 20.0


@dataclass
class Process:
    """One process with turns to take. `there` holds the parts that are actually on the device, including parts that are
    being moved off it.
    """

    holder: Holder
    turns: list[list[Parts]]
    life: int
    holding: Holding = field(default_factory=Holding)
    stage: int = 0
    progress: int = 0
    registered: bool = False
    sent: int = 0
    answers: list[tuple[int, DeviceOrder]] = field(default_factory=list)
    leaving: Parts = NOTHING
    hung: bool = False

    @property
    def there(self) -> Parts:
        return self.holding.holds


class World:
    """The turns, the processes and a supervisor. A message can take any amount of time, and the scheduler can
    restart."""

    def __init__(self, seed: int, services: dict[str, int]) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.lives = 1
        self.killed = 0
        self.told: list[tuple[str, Parts]] = []
        """Changes to the ledger, each given as the holder and the parts that it holds from then on."""
        self.fair = False
        """Whether every process that does not hang makes progress. If so, only hanging processes may be killed."""
        holders = [(service, i) for service, count in services.items() for i in range(count)]
        self.limits = dict.fromkeys(holders, LIMIT_S)
        self.turns = DeviceTurns(self.limits)
        self.registry: dict[Holder, Register] = {}
        self.processes = {
            holder: Process(holder, [self.chance.choice(TURNS[holder[0]]) for _ in range(self.chance.randint(1, 4))], 1)
            for holder in holders
        }

    # ---- messages to the scheduler

    def send(self, process: Process) -> None:
        """Deliver the report of a process, or the registration that precedes it."""
        if not process.registered:
            request = Register(
                service=process.holder[0],
                instance=process.holder[1],
                incarnation=process.life,
                pid=process.life,
                host="h",
                endpoint="",
            )
            self.registry[process.holder] = request
            self.turns.registered(request, self.now)
            process.registered = True
            return
        own = process.holding
        if process.sent == own.number or process.leaving:
            return
        process.sent = own.number
        report = HoldDevices(
            service=process.holder[0],
            instance=process.holder[1],
            incarnation=process.life,
            number=own.number,
            holds=sorted(own.holds),
            using=sorted(own.using),
            wants=sorted(own.wants),
        )
        self.turns.hold(report, (process.holder, process.life, own.number), self.now + POLL_S, self.now)

    def beat(self, process: Process) -> None:
        if process.registered and not process.hung:
            self.turns.beat(
                Heartbeat(
                    service=process.holder[0],
                    instance=process.holder[1],
                    incarnation=process.life,
                    state="READY",
                    progress=process.progress,
                ),
                self.now,
            )

    def settle(self) -> None:
        effects: list[Effect] = self.turns.settle(self.now)
        for effect in effects:
            match effect:
                case Answer(ref, DeviceOrder() as order):
                    holder, life, number = ref
                    if self.processes[holder].life == life:
                        self.processes[holder].answers.append((number, order))
                case Fail(ref):
                    holder, life, number = ref
                    if self.processes[holder].life == life and self.processes[holder].sent == number:
                        self.processes[holder].sent = 0  # The call is sent again.
                case TellDevices(name, parts):
                    self.told.append((name, frozenset(parts)))
                case KillProcess():
                    process = self.processes[effect.holder]
                    if process.life == effect.incarnation:
                        assert process.hung or not self.fair, f"{effect.holder} was making progress: {effect.cause}"
                        self.killed += 1
                        self.die(process)
                    self.turns.gone(effect.holder, effect.incarnation)

    # ---- the processes

    def act(self, process: Process) -> None:
        """Let a process take one step: take an answer, finish leaving, work, or begin its next turn."""
        own = process.holding
        process.progress += 1
        if process.leaving:
            own.left(process.leaving)
            process.leaving = NOTHING
        elif process.answers:
            number, order = process.answers.pop(0)
            process.leaving = own.obey(number, frozenset(order.parts), granted=order.granted)
            if process.leaving and process.holder[0] in ALL_AT_ONCE:
                process.leaving = own.holds
            assert process.leaving.isdisjoint(own.using)
        elif own.using and process.turns:
            stages = process.turns[0]
            if own.using >= stages[process.stage]:
                process.stage += 1
            if process.stage < len(stages):
                own.want(stages[process.stage])
            else:
                process.turns.pop(0)
                process.stage = 0
                if not process.turns or self.chance.random() < 0.7:
                    own.done()
        elif process.turns and not own.wants:
            own.want(process.turns[0][process.stage])
        elif own.using:
            own.done()

    def die(self, process: Process) -> None:
        """End the process. Its memory is gone, and its next life begins the turn from the start."""
        self.lives += 1
        self.processes[process.holder] = Process(process.holder, process.turns, self.lives)

    def restart_scheduler(self) -> None:
        self.turns = DeviceTurns(self.limits)
        self.turns.begin(self.registry, self.now)
        for process in self.processes.values():
            process.answers.clear()
            process.sent = 0  # An open call is sent again.

    def check(self) -> None:
        there = [(process.holder, part) for process in self.processes.values() for part in process.there]
        for holder, part in there:
            for other, beside in there:
                assert (part, beside) not in FORBIDDEN, f"{part} of {holder} beside {beside} of {other}"

    def at_random(self, hurt: float) -> None:
        process = self.chance.choice(list(self.processes.values()))
        action = self.chance.random()
        if action < hurt / 3:
            self.die(process)
        elif action < hurt * 2 / 3:
            process.hung = True
        elif action < hurt:
            self.restart_scheduler()
        elif action < hurt + 0.1:
            self.pass_time()
        elif not process.hung:
            self.chance.choice((self.send, self.act))(process)
        self.settle()
        self.check()

    def any_timing(self) -> None:
        """Let one process act, or deliver one of its messages. No deadline expires."""
        self.chance.choice((self.send, self.act))(self.chance.choice(list(self.processes.values())))
        self.settle()
        self.check()

    def pass_time(self) -> None:
        self.now += 1.0
        for process in self.processes.values():
            if not process.hung:
                process.progress += self.works(process)
                self.beat(process)

    def works(self, process: Process) -> bool:
        """Return whether the working thread of a process advances."""
        return bool(process.holding.using or process.leaving)

    def round(self) -> None:
        for process in list(self.processes.values()):
            if not process.hung:
                self.send(process)
                self.settle()
                self.act(process)
                self.check()
        self.pass_time()
        self.settle()
        self.check()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 3),
    critics=st.integers(0, 2),
    scorers=st.integers(0, 2),
    engines=st.integers(0, 2),
    hurt=st.sampled_from([0.0, 0.02, 0.1]),
)
def test_forbidden_parts_never_share_the_devices_and_all_work_is_done(
    seed: int, workers: int, critics: int, scorers: int, engines: int, hurt: float
) -> None:
    world = World(seed, {WORKER: workers, WORKERS[CRITIC]: critics, SCORER: scorers, ENGINE: engines})
    for _ in range(400):
        world.at_random(hurt)
    turns = sum(len(process.turns) for process in world.processes.values())
    rounds = 0
    while any(process.turns for process in world.processes.values() if not process.hung):
        world.round()
        rounds += 1
        world.fair = rounds > LIMIT_S
        assert rounds < 200 + 40 * turns, {p.holder: (p.turns, p.holding.__dict__) for p in world.processes.values()}


def steps_of(model: str, count: int) -> list[list[Parts]]:
    """Return the turns of `count` training steps: a forward pass, then the update. The turn of the pass ends, because
    the update begins only once every model has made its pass."""
    parameters, gradients, optimizer = trained_parts(model)
    update = [frozenset({parameters, gradients}), frozenset({parameters, gradients, optimizer})]
    return [turn for _ in range(count) for turn in ([frozenset({parameters})], update)]


class TwoModels(World):
    """A world in which a driver calls two ranks of each of two trained models, with a reference that scores and an
    engine that evaluates in between. The update of the policy waits for the values of the critic, and the critic's for
    the advantages: an update begins only after the passes of all ranks, and the next step after all updates."""

    def __init__(self, seed: int, *, keeps: bool) -> None:
        """With `keeps`, a model keeps its turn after a forward pass until its next call."""
        super().__init__(seed, {**dict.fromkeys(WORKERS.values(), 2), SCORER: 1, ENGINE: 1})
        self.keeps = keeps
        steps = self.chance.randint(1, 3)
        for model, service in WORKERS.items():
            for rank in range(2):
                self.processes[service, rank].turns = steps_of(model, steps)

    def act(self, process: Process) -> None:
        left = len(process.turns)
        if self.waits(process) and not process.answers and not process.leaving:
            return
        super().act(process)
        if process.holder[0] not in WORKERS.values() or len(process.turns) == left:
            return
        process.holding.done()
        if left % 2 == 0 and self.keeps:
            process.holding.using = process.there
            process.holding.number += 1

    def waits(self, process: Process) -> bool:
        """Return whether a rank has made its pass or its update and has no call before all others have made theirs."""
        left = len(process.turns)
        if process.holder[0] not in WORKERS.values() or process.holding.wants or process.stage:
            return False
        ranks = [other for holder, other in self.processes.items() if holder[0] in WORKERS.values()]
        return any(len(other.turns) > left for other in ranks)

    def works(self, process: Process) -> bool:
        return super().works(process) and not self.waits(process)


@pytest.mark.parametrize("seed", range(150))
def test_two_models_train_in_turns_and_neither_is_killed(seed: int) -> None:
    world = TwoModels(seed, keeps=False)
    rounds = 0
    while any(process.turns for process in world.processes.values()):
        world.round()
        rounds += 1
        assert rounds < 400, {p.holder: (p.turns, p.holding.__dict__) for p in world.processes.values()}
    assert world.killed == 0


def test_a_model_that_kept_its_turn_after_a_forward_pass_would_be_killed() -> None:
    kills = 0
    for seed in range(30):
        world = TwoModels(seed, keeps=True)
        for _ in range(100):
            world.round()
        kills += world.killed
    assert kills > 10


@given(seed=st.integers(0, 2**32))
def test_a_step_runs_in_the_same_order_with_any_timing(seed: int) -> None:
    """The optimizer leaves, the engine wakes with its weights, the parameters leave, the key/value memory wakes, the
    engine sleeps, the reference scores, and the trainer returns. The test specifies only which process has work and the
    order in which the work becomes possible."""
    world = World(seed, {WORKER: 1, SCORER: 1, ENGINE: 1})
    for process in world.processes.values():
        process.turns = []

    def work(service: str, turn: list[Parts]) -> None:
        process = world.processes[(service, 0)]
        process.turns = [turn]
        while process.turns or process.holding.using:
            world.any_timing()

    train, publish, scoring, sampling = TURNS[WORKER][1], TURNS[WORKER][0], TURNS[SCORER][0], TURNS[ENGINE][0]
    work(WORKER, train)
    for _ in range(2):
        del world.told[:]
        work(WORKER, publish)  # The parameters are already on the device, so nothing moves.
        work(ENGINE, sampling)
        work(SCORER, scoring)
        work(WORKER, train)
        assert world.told == [
            ("policy-trainer-worker/0", {PARAMETERS}),
            ("rollout/0", {WEIGHTS}),
            ("policy-trainer-worker/0", set()),
            ("rollout/0", {WEIGHTS, KV_CACHE}),
            ("rollout/0", set()),
            ("reference/0", {REFERENCE}),
            ("policy-trainer-worker/0", {PARAMETERS}),
            ("reference/0", set()),
            ("policy-trainer-worker/0", {PARAMETERS, GRADIENTS}),
            ("policy-trainer-worker/0", {PARAMETERS, GRADIENTS, OPTIMIZER}),
        ]


def test_a_hung_process_is_killed_at_once_if_busy_or_when_others_need_the_device_if_idle() -> None:
    world = World(0, {WORKER: 1, ENGINE: 1})
    engine, worker = world.processes[(ENGINE, 0)], world.processes[(WORKER, 0)]
    worker.turns, engine.turns = [], [TURNS[ENGINE][0]]
    while engine.turns or engine.sent != engine.holding.number:
        world.round()
    engine.hung = True  # The engine is idle, and its weights are still on the device.
    assert engine.there
    for _ in range(50):
        world.round()
    assert world.killed == 0
    worker.turns = [[frozenset({PARAMETERS, GRADIENTS})]]
    for _ in range(30):
        world.round()
    assert world.killed == 1
    assert not worker.turns
    world.processes[(ENGINE, 0)].turns = [TURNS[ENGINE][1]]
    while not world.processes[(ENGINE, 0)].holding.using:
        world.round()
    world.processes[(ENGINE, 0)].hung = True  # No process is waiting, but the engine's own work continues.
    for _ in range(30):
        world.round()
    assert world.killed == 2
    assert not world.processes[(ENGINE, 0)].turns


def test_only_the_parameters_of_two_trained_models_may_be_on_the_devices_together() -> None:
    policy, critic = trained_parts(POLICY), CRITIC_PARTS
    together = {(one, other) for one in policy for other in critic} - set(FORBIDDEN)
    assert together == {(policy[0], critic[0])}
    for part in critic:
        assert {(WEIGHTS, part), (KV_CACHE, part)} <= set(FORBIDDEN)
    assert {(REFERENCE, part) for part in (*policy, *critic)} - set(FORBIDDEN) == {
        (REFERENCE, policy[0]),
        (REFERENCE, critic[0]),
    }


@given(
    parts=st.lists(
        st.sampled_from([PARAMETERS, GRADIENTS, OPTIMIZER, *CRITIC_PARTS, REFERENCE, WEIGHTS, KV_CACHE]), max_size=8
    )
)
def test_a_ledger_refuses_exactly_the_forbidden_pairs(parts: list[str]) -> None:
    ledger = DeviceLedger()
    there: set[str] = set()
    for index, part in enumerate(parts):
        wrong = [other for other in there if (part, other) in FORBIDDEN or (other, part) in FORBIDDEN]
        if not wrong:
            ledger.put(("p", index), frozenset({part}))
            there.add(part)
            continue
        with pytest.raises(
            ForbiddenPair, match=f"{re.escape(part)} of p/{index} .* at the same time as ({'|'.join(wrong)}) of p/"
        ):
            ledger.put(("p", index), frozenset({part}))
    assert ledger.resident == there


class Desk:
    """Device turns that receive individual reports, for conditions that must hold in one exact situation."""

    def __init__(self, *holders: Holder) -> None:
        self.turns = DeviceTurns(dict.fromkeys(holders, LIMIT_S))
        self.numbers = dict.fromkeys(holders, 0)
        self.granted: list[Holder] = []
        self.recalled: dict[Holder, Parts] = {}
        for service, instance in holders:
            self.turns.registered(
                Register(service=service, instance=instance, incarnation=1, pid=1, host="h", endpoint=""), 0.0
            )

    def report(self, holder: Holder, holds: Set[str], *, using: Set[str] = NOTHING, wants: Set[str] = NOTHING) -> None:
        self.numbers[holder] += 1
        request = HoldDevices(
            service=holder[0],
            instance=holder[1],
            incarnation=1,
            number=self.numbers[holder],
            holds=sorted(holds),
            using=sorted(using),
            wants=sorted(wants),
        )
        self.turns.hold(request, (holder, frozenset(holds)), POLL_S, 0.0)
        for effect in self.turns.settle(0.0):
            match effect:
                case Answer((other, held), DeviceOrder() as order):
                    if order.granted:
                        self.granted.append(other)
                    self.recalled[other] = held - frozenset(order.parts)


RANK_0, RANK_1, SCORER_0, ENGINE_0 = (WORKER, 0), (WORKER, 1), (SCORER, 0), (ENGINE, 0)


def test_a_later_request_does_not_overtake_one_that_it_would_block() -> None:
    desk = Desk(RANK_0, SCORER_0, ENGINE_0)
    desk.report(SCORER_0, set(), wants={REFERENCE})
    desk.report(SCORER_0, {REFERENCE}, using={REFERENCE})
    desk.report(ENGINE_0, set(), wants={WEIGHTS, KV_CACHE})
    desk.report(
        RANK_0, set(), wants={PARAMETERS}
    )  # The rank's parameters may share the device with the reference, but not with the engine's cache.
    assert desk.granted == [SCORER_0]
    desk.report(SCORER_0, {REFERENCE})
    assert desk.recalled[SCORER_0] == {REFERENCE}
    desk.report(SCORER_0, set())
    assert desk.granted == [SCORER_0, ENGINE_0]


def test_a_rank_is_admitted_while_another_waits_for_it_in_a_collective() -> None:
    desk = Desk(RANK_0, RANK_1, ENGINE_0)
    desk.report(ENGINE_0, set(), wants={WEIGHTS})
    desk.report(ENGINE_0, {WEIGHTS}, using={WEIGHTS})
    desk.report(RANK_0, set(), wants={PARAMETERS})
    desk.report(RANK_0, {PARAMETERS}, using={PARAMETERS})
    desk.report(ENGINE_0, {WEIGHTS}, wants={WEIGHTS, KV_CACHE})  # The engine's service was first in the queue.
    desk.report(RANK_1, set(), wants={PARAMETERS})
    assert desk.granted == [ENGINE_0, RANK_0, RANK_1]


def test_a_report_that_completes_a_forbidden_pair_is_refused_with_an_error_that_names_both_parts() -> None:
    desk = Desk(RANK_0, ENGINE_0)
    desk.report(RANK_0, {OPTIMIZER})
    with pytest.raises(RpcError, match=r"engine\.weights of rollout/0 .* policy\.optimizer of policy-trainer-worker/0"):
        desk.report(ENGINE_0, {WEIGHTS})
