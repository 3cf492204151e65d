"""Workers for tests of the state machine: they carry out its calls at once, and keep what a model would be made of."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from proto.messages import BatchMeta, Canary, TaskHandle, WeightsRef
from services.policy_trainer.tinker.errors import Category
from services.policy_trainer.tinker.events import (
    CallDone,
    CallRefused,
    Commit,
    Effect,
    Event,
    Kept,
    ReleaseData,
    Settle,
    Step,
    Submitted,
    WorkerCall,
    WorkersGone,
    WorkersReady,
)
from services.policy_trainer.tinker.limits import KeyLimits
from services.policy_trainer.tinker.records import Adapter, Model, RequestKind, Session, TrainingRequest, kind_of
from services.policy_trainer.tinker.state import State

NOBODY = Canary(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), tolerance=0.0)


def state(max_models: int = 8, model_requests: int = 256, key_requests: int = 1024, key_bytes: int = 1 << 30) -> State:
    return State(max_models, KeyLimits(model_requests, key_requests, key_bytes))


@dataclass
class Workers:
    """A group of workers. A model's weights are the list of the gradients that its steps have applied."""

    state: State
    now: float = 1000.0
    weights: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    saved: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    gradients: dict[str, list[str]] = field(default_factory=dict)
    """The gradients that are accumulated, by model that is open."""
    calls: list[WorkerCall] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    released: list[ReleaseData] = field(default_factory=list)
    journal: dict[tuple[str, str], object] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    """Requests that the workers refuse."""
    holds: bool = False
    """Whether calls wait until `go_on`."""
    waiting: list[WorkerCall] = field(default_factory=list)

    def handle(self, event: Event) -> None:
        self._take(self.state.handle(event, self.now))

    def _take(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WorkerCall):
                self.calls.append(effect)
                self.waiting.append(effect)
            elif isinstance(effect, Settle):
                self.settled.append(effect.request)
            elif isinstance(effect, ReleaseData):
                self.released.append(effect)
            elif isinstance(effect, Commit):
                for record in effect.kept:
                    self.journal[kind_of(record), record.id] = copy.deepcopy(record)
                for kind, name in effect.dropped:
                    self.journal.pop((kind, name), None)
        if not self.holds:
            self.go_on()

    def go_on(self, most: int = sys.maxsize) -> None:
        """Carry out the calls that wait, up to `most` of them."""
        while self.waiting and most > 0:
            call, most = self.waiting.pop(0), most - 1
            event = self._carried_out(call)
            self._take(self.state.handle(event, self.now))

    def _carried_out(self, call: WorkerCall) -> Event:
        request = call.request
        name = request.id if request is not None else ""
        if name in self.bad and call.step == Step.RUN:
            self.gradients.get(call.model, []).clear()
            return CallRefused(call, "bad numbers", Category.USER)
        if call.step == Step.PARK:
            self.gradients.pop(call.model)
        elif call.step == Step.OPEN:
            self.gradients[call.model] = []
        elif request is not None and request.kind == RequestKind.CREATE:
            self.weights[call.model], self.gradients[call.model] = [], []
        elif request is not None and request.kind in (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD):
            start, end = call.piece
            assert call.model in self.gradients, "the model is not open"
            if not call.forward_only:
                self.gradients[call.model].append(f"{request.seq}[{start}:{end}]")
            tasks = [TaskHandle(f"api/1/{request.first + index}", 1) for index in range(start, end)]
            return CallDone(call, sums={"loss": float(end - start)}, part=BatchMeta(tasks=tasks))
        elif request is not None and request.kind == RequestKind.OPTIM_STEP:
            self.weights[call.model].append(tuple(self.gradients[call.model]))
            self.gradients[call.model] = []
            return CallDone(call, sums={"grad_norm": 1.0})
        elif request is not None and request.kind == RequestKind.SAVE_SAMPLER:
            return CallDone(call, ref=reference(call.model, len(self.weights[call.model])))
        return CallDone(call)

    def die(self) -> None:
        """Lose all state, and be taken over again."""
        self.gradients.clear()
        self.waiting.clear()
        self.handle(WorkersGone())
        self.handle(WorkersReady())

    # ---- clients

    def session(self, name: str = "s", key: str = "k") -> None:
        self.handle(Kept(Session(id=name, key=key, opened=self.now, seen=self.now)))

    def model(self, session: str = "s", number: int = 0, key: str = "k") -> str:
        """Make a model and return its id."""
        name = f"{session}:train:{number}"
        adapter = Adapter(rank=4, seed=1, groups=["mlp"])
        own = self.state.own.next_number()
        self.handle(
            Kept(
                Model(
                    id=name,
                    number=own,
                    key=key,
                    session=session,
                    base="b",
                    adapter=adapter,
                    opened=self.now,
                    used=self.now,
                )
            )
        )
        self.ask(name, 0, RequestKind.CREATE)
        return name

    def ask(
        self, model: str, seq: int, kind: RequestKind, tokens: Iterable[int] = (), refused: str = "", **body: object
    ) -> TrainingRequest:
        """Submit a request."""
        counts = list(tokens) if kind in (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD) else []
        request = TrainingRequest(
            model=model,
            seq=seq,
            kind=kind,
            at=self.now,
            tokens=counts,
            nbytes=sum(counts),
            first=seq * 10_000,
            refused=refused,
            body=body,
        )
        self.handle(Submitted(request))
        return self.state.requests.get(request.id, request)


def reference(model: str, step: int) -> WeightsRef:
    return WeightsRef(
        lineage=1,
        step=step,
        task_id=f"weights/1/{step}",
        fence=1,
        store="batch-store/0",
        nbytes=1,
        canary=NOBODY,
        drill=NOBODY,
        drill_seed=0,
    )


def ready(**limits: int) -> Workers:
    """Return workers that accept calls, with the session `s` of the key `k`."""
    workers = Workers(state(**limits))
    workers.handle(WorkersReady())
    workers.session()
    return workers
