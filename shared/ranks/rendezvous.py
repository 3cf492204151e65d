"""Rank 0's side of the rendezvous before every collective: a pure state machine over arrivals.

No rank enters a collective that another rank cannot join: a rank that failed reports the failure here, and all ranks
refuse the call, leaving their process group intact. An ended group cannot be revived. A rank that joins again after a
restart ends the group, and all ranks form a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proto.messages import ErrorCode, Meet, Met
from shared.rpc.errors import RpcError

JOIN, END = "join", "end"
_DECIDED_ROUNDS = 64
"""Maximum number of decided rounds that are kept for late ranks."""

Answer = Callable[[Met | RpcError], None]


@dataclass
class _Round:
    deadline: float
    waiting: dict[int, list[Answer]] = field(default_factory=dict)
    """The answers that each rank waits for: a rank that withdraws still waits for its first answer, too."""

    def answer_all(self, outcome: Met | RpcError) -> None:
        for answers in self.waiting.values():
            for answer in answers:
                answer(outcome)


class Rendezvous:
    """A group that is being formed, has been formed or has ended. Ranks are answered through callbacks; `ended` holds
    the cause of the end."""

    def __init__(self, names: Sequence[str], generation: int, *, deadline_s: float) -> None:
        """`names` are the names of the processes by rank, such as `reference/0`. `generation` identifies
        the group and is not 0. A round that takes longer than `deadline_s` ends the group."""
        self.ended = ""
        self.store = ""
        """Address of the store of the process group, which the ranks learn when they have joined."""
        self._names = names
        self._generation = generation
        self._deadline_s = deadline_s
        self._formed = False
        self._rounds: dict[str, _Round] = {}
        self._decided: OrderedDict[str, Met] = OrderedDict()
        self._parked: dict[int, Answer] = {}

    def arrive(self, request: Meet, answer: Answer, now: float) -> None:
        """Handle the arrival of a rank at a round. `answer` is called once, now or when the round is decided."""
        if not 0 <= request.rank < len(self._names):
            text = f"rank {request.rank} of a group of {len(self._names)}: ranks count from 0"
            answer(RpcError(ErrorCode.BAD_REQUEST, text))
        elif self.ended:
            answer(self._ended_error())
        elif request.round == JOIN:
            self._join(request, answer)
        elif request.generation != self._generation or not self._formed:
            answer(RpcError(ErrorCode.LOST, f"group {request.generation:x} has ended; this is another group"))
        elif request.round == END:
            self._parked[request.rank] = answer
        elif request.round in self._decided:
            answer(self._decided[request.round])
        else:
            current = self._rounds.setdefault(request.round, _Round(now + self._deadline_s))
            current.waiting.setdefault(request.rank, []).append(answer)
            if request.failure:
                self._decide(request.round, [f"rank {request.rank}: {request.failure}"])
            elif len(current.waiting) == len(self._names):
                self._decide(request.round, [])

    def next_deadline(self) -> float | None:
        """Return the next time at which `expire` must be called, or None if no rank is waiting."""
        return min((each.deadline for each in self._rounds.values()), default=None)

    def expire(self, now: float) -> None:
        """End the group if a round is past its deadline, naming the missing ranks."""
        for name, current in self._rounds.items():
            if now >= current.deadline:
                missing = sorted(set(range(len(self._names))) - current.waiting.keys())
                names = ", ".join(self._names[rank] for rank in missing)
                self.end(f"{name}: {names} did not join within {self._deadline_s:g} s of the first rank")
                return

    def end(self, cause: str) -> None:
        """End the group and answer every waiting rank."""
        self.ended = self.ended or cause
        for current in self._rounds.values():
            current.answer_all(self._ended_error())
        for answer in self._parked.values():
            answer(self._ended_error())
        self._rounds.clear()
        self._parked.clear()

    def _join(self, request: Meet, answer: Answer) -> None:
        if self._formed:
            # The rank gets no answer: its client asks again until rank 0 has restarted, too, and admits the rank.
            self.end(f"{self._names[request.rank]} was restarted: the group is being formed again")
            return
        self._parked[request.rank] = answer
        if len(self._parked) == len(self._names):
            self._formed = True
            joined, self._parked = self._parked, {}
            for each in joined.values():
                each(Met(generation=self._generation, store=self.store))

    def _decide(self, name: str, failures: list[str]) -> None:
        met = Met(generation=self._generation, failures=failures)
        self._decided[name] = met
        if len(self._decided) > _DECIDED_ROUNDS:
            self._decided.popitem(last=False)
        self._rounds.pop(name).answer_all(met)

    def _ended_error(self) -> RpcError:
        return RpcError(ErrorCode.LOST, f"the group has ended: {self.ended}")
