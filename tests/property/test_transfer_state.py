"""Lets engines request transfers, die, hang and return, in any order. Checks that communicators are never shared,
repaired or leaked and that the failure of one engine never affects another.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto.messages import AskTransfer, EndTransfer
from services.policy_trainer.worker.weights.transfers import (
    AbortTransfer,
    GrantTransfer,
    TransferRefused,
    TransferState,
)

DEADLINE_S = 10.0
ENGINES = st.integers(0, 2)


def asked(engine: int, life: int, communicator: int) -> AskTransfer:
    return AskTransfer(
        instance=engine,
        incarnation=life,
        communicator=communicator,
        ranks=1,
        host_id="",
        lineage=0,
        step=0,
        drill=False,
    )


class AnyOrder(RuleBasedStateMachine):
    """Transfers in any order.

    `holds` and `life` are the state from each engine's point of view; `open` holds the communicators of the trainer's
    threads.
    """

    def __init__(self) -> None:
        super().__init__()
        numbers = itertools.count(1)
        self.transfers = TransferState(lambda: next(numbers), DEADLINE_S)
        self.lives = itertools.count(1)
        self.now = 0.0
        self.life = {engine: next(self.lives) for engine in range(3)}
        self.holds = dict.fromkeys(range(3), 0)
        self.known: set[int] = set()
        """Lives that have requested a transfer."""
        self.earlier: dict[int, list[int]] = {engine: [] for engine in range(3)}
        self.open: dict[int, tuple[int, int]] = {}
        """Engine and life of each communicator."""
        self.closed: set[int] = set()
        self.sending: dict[int, tuple[int, float]] = {}
        """Number of the current transfer of each communicator, and the time by which the transfer must be over."""
        self.expected: dict[int, float] = {}
        """Time by which the next part of a version must be requested, for each communicator in the middle of one."""

    def carry_out(self, aborts: list[AbortTransfer], *, only: int | None = None) -> None:
        """Close the communicators of aborted transfers. `only` is the one engine that may be affected."""
        for abort in aborts:
            assert only in (None, abort.engine)
            assert self.open.pop(abort.communicator)[0] == abort.engine
            self.sending.pop(abort.communicator, None)
            self.expected.pop(abort.communicator, None)
            self.closed.add(abort.communicator)

    def grant(self, engine: int, life: int, communicator: int) -> GrantTransfer:
        """Grant the transfer for which an engine asks. Raises TransferRefused."""
        aborts, grant = self.transfers.ask(asked(engine, life, communicator), self.now)
        self.carry_out(aborts, only=engine)
        if grant.new:
            assert grant.communicator not in self.open.keys() | self.closed
            self.open[grant.communicator] = (engine, life)
        assert grant.engine == engine
        assert self.open[grant.communicator] == (engine, life)
        assert grant.communicator not in self.sending
        self.expected.pop(grant.communicator, None)
        self.sending[grant.communicator] = (grant.number, self.now + DEADLINE_S)
        return grant

    @rule(engine=ENGINES, heard=st.booleans())
    def ask(self, engine: int, heard: bool) -> None:
        held = self.holds[engine]
        healthy = self.open.get(held) == (engine, self.life[engine]) and held not in self.sending
        grant = self.grant(engine, self.life[engine], held)
        self.known.add(self.life[engine])
        assert grant.new != healthy  # A communicator is kept exactly as long as nothing has gone wrong with it.
        if heard:
            self.holds[engine] = grant.communicator

    @precondition(lambda self: any(self.earlier.values()))
    @rule(data=st.data())
    def ask_of_a_replaced_life(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([each for each, lives in self.earlier.items() if lives]))
        life = data.draw(st.sampled_from(self.earlier[engine]))
        before = dict(self.open)
        with pytest.raises(TransferRefused):
            self.grant(engine, life, data.draw(st.sampled_from([0, *before])))
        assert self.open == before

    @rule(engine=ENGINES)
    def begin_a_new_life(self, engine: int) -> None:
        """Kill an engine and start it again. The trainer learns of the restart from the engine's first request."""
        old = self.life[engine]
        self.life[engine] = next(self.lives)
        self.holds[engine] = 0
        self.ask(engine, True)
        assert old not in {life for _, life in self.open.values()}
        if old in self.known:
            self.earlier[engine].append(old)

    @precondition(lambda self: self.sending)
    @rule(data=st.data(), failure=st.sampled_from(["", "killed"]), stale=st.booleans(), more=st.booleans())
    def end(self, data: st.DataObject, failure: str, stale: bool, more: bool) -> None:
        communicator = data.draw(st.sampled_from(sorted(self.sending)))
        engine, life = self.open[communicator]
        number = self.sending[communicator][0] - int(stale)
        before = dict(self.sending)
        request = EndTransfer(
            instance=engine, incarnation=life, communicator=communicator, number=number, failure=failure
        )
        self.carry_out(self.transfers.end(request, self.now, more=more), only=engine)
        if stale:
            assert self.sending == before
        elif failure:
            assert communicator in self.closed
        else:
            assert communicator in self.open
            del self.sending[communicator]
            if more:
                self.expected[communicator] = self.now + DEADLINE_S

    @precondition(lambda self: self.open or self.closed)
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        communicator = data.draw(st.sampled_from(sorted(self.open.keys() | self.closed)))
        engine = self.open.get(communicator, (None,))[0]
        self.carry_out(self.transfers.broke(communicator, "connection closed"), only=engine)
        assert communicator not in self.open

    @rule(seconds=st.sampled_from([0.5, 4.0, DEADLINE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        on_time = {each for each, (_, deadline) in self.sending.items() if self.now < deadline}
        idle = self.open.keys() - self.sending.keys()
        idle -= {each for each, deadline in self.expected.items() if self.now >= deadline}
        self.carry_out(self.transfers.expired(self.now))
        assert self.sending.keys() == on_time
        assert self.open.keys() == on_time | idle

    @invariant()
    def one_communicator_an_engine(self) -> None:
        engines = [engine for engine, _ in self.open.values()]
        assert len(engines) == len(set(engines))

    @invariant()
    def whoever_hangs_is_given_up_in_time(self) -> None:
        deadlines = [*(deadline for _, deadline in self.sending.values()), *self.expected.values()]
        assert self.transfers.next_deadline() == min(deadlines, default=None)


TestAnyOrder = AnyOrder.TestCase
