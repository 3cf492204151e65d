"""The state machine of a server: `handle(event, now) -> effects`. It uses no I/O, clock, socket or thread.

Requests of a model run in the order of their numbers, whatever the order in which they arrive, and one call of the
workers runs at a time. Everything is per model: a failed `forward_backward` fails the model's next `optim_step`, and
costs no other model anything. After the workers have lost their state, each model is opened again as it was after its
last change, and the gradients since then are computed again, in the same order and thus with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from services.policy_trainer.tinker.belongings import Belongings
from services.policy_trainer.tinker.errors import BadRequest, Category, NotThere
from services.policy_trainer.tinker.events import (
    Beat,
    CallDone,
    CallRefused,
    ClockTick,
    Commit,
    Deleted,
    Effect,
    Event,
    Fetched,
    Kept,
    ReleaseData,
    ReleaseVersion,
    RemoveFolder,
    Settle,
    Step,
    Stopping,
    Submitted,
    WorkerCall,
    WorkersGone,
    WorkersReady,
)
from services.policy_trainer.tinker.limits import KeyLimits
from services.policy_trainer.tinker.records import (
    PASSES,
    Belonging,
    Model,
    Record,
    RequestKind,
    SavedWeights,
    TrainingRequest,
    kind_of,
)
from services.policy_trainer.tinker.saves import saved_by
from services.policy_trainer.tinker.turns import FairTurns
from services.policy_trainer.tinker.wire import pieces

QUANTUM_TOKENS = 65536
"""Maximum number of tokens of a call of the workers, and what a key may use before others have their turn."""
CALL_TOKENS = 1024
"""What a call without data counts in a turn."""
IDLE_S = 600.0
"""Seconds without a sign of life after which the models of a session are parked."""
GAP_S = 360.0
"""Seconds that the requests of a model wait for one with a lower number. The SDK repeats a request for five minutes."""
KEEP_S = 3600.0
"""Seconds for which a result is kept for a client that has not fetched it."""
FETCHED_S = 20.0
"""Seconds for which a result is kept for a client that may have lost the response."""


class State:
    """All sessions, models and requests of a server."""

    def __init__(self, max_models: int, limits: KeyLimits) -> None:
        self.own = Belongings()
        self.requests: dict[str, TrainingRequest] = {}
        self._max_models = max_models
        self._limits = limits
        self._ready = self._stopping = False
        self._calling: WorkerCall | None = None
        self._open: set[str] = set()
        """The models whose state the workers have."""
        self._replay: dict[str, list[int]] = {}
        """The requests whose gradients must be computed again, by model."""
        self._progress: dict[str, int] = {}
        """The number of datums of a request that are done, by request."""
        self._gaps: dict[str, float] = {}
        """The time since which a model waits for a number."""
        self._keys = FairTurns(QUANTUM_TOKENS)
        self._models: dict[str, FairTurns] = {}
        self._now = 0.0
        self._out: list[Effect] = []
        self._kept: dict[int, Record] = {}

    def restore(self, records: Iterable[Belonging | TrainingRequest]) -> list[Effect]:
        """Take over the records of an earlier life. Return what that life may not have carried out."""
        for record in records:
            if isinstance(record, TrainingRequest):
                self.requests[record.id] = record
            else:
                self.own.put(record)
        released = [request for request in self.requests.values() if request.released and request.tokens]
        return [
            ReleaseData(self.own.models[request.model].number, request.first, len(request.tokens))
            for request in released
        ]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Return what must be done because of `event`, in this order. `now` is in seconds since the epoch."""
        self._now, self._out, self._kept = now, [], {}
        match event:
            case Submitted():
                self._submit(event)
            case Kept():
                self.own.put(event.record)
                self._keep(event.record)
            case Beat():
                self.own.sessions[event.session].seen = self._now
            case CallDone():
                self._returned(event)
            case CallRefused():
                self._refuse(event)
            case WorkersGone():
                self._gone()
            case WorkersReady():
                self._ready = True
            case Stopping():
                self._stopping = True
            case Fetched():
                self._fetched(event)
            case Deleted():
                self._delete(self.own.checkpoints[event.path])
            case ClockTick():
                self._tick()
            case _ as unreachable:
                assert_never(unreachable)
        self._next()
        return self._out

    # ---- questions

    def request(self, key: str, name: str) -> TrainingRequest:
        """Return a request of a key by its id. Raises NotThere, and BadRequest for one whose result is gone."""
        request = self.requests.get(name)
        model, _, seq = name.rpartition("/")
        owner = self.own.models.get(model)
        if owner is None or owner.key != key or not seq.isdecimal():
            raise NotThere(f"request {name[:200]!r}: not there")
        if request is None and int(seq) <= owner.reached:
            raise BadRequest(f"request {name}: its result is no longer kept; it was done over {KEEP_S:.0f} s ago")
        if request is None:
            raise NotThere(f"request {name[:200]!r}: not there")
        return request

    def admit(self, model: Model, seq: int, nbytes: int) -> None:
        """Check the limits of a request before its data are put. Raises BadRequest: 429 if the client must wait, and
        409 if the model takes no more requests."""
        mine = [request for request in self.requests.values() if self.own.models[request.model].key == model.key]
        self._limits.admit(model, seq, nbytes, mine)

    def too_much(self, model: Model, nbytes: int) -> str:
        """Return why data that wait for the model's next optim_step are too much, or an empty string."""
        return self._limits.too_much(model, nbytes, self.requests.values())

    def next_seq(self, model: Model) -> int:
        """Return the number of the next request of a client that does not number its requests."""
        open_ones = [request.seq for request in self.requests.values() if request.model == model.id]
        return max([model.reached, *open_ones]) + 1

    # ---- requests

    def _submit(self, event: Submitted) -> None:
        request, model = event.request, self.own.models[event.request.model]
        if request.id in self.requests or request.seq <= model.reached:
            return
        self.requests[request.id] = request
        model.used = self._now
        self._keep(request, model)

    def _fetched(self, event: Fetched) -> None:
        request = self.requests.get(event.request)
        if request is not None and request.done and not request.fetched:
            request.fetched = self._now
            self._keep(request)

    def _release(self, request: TrainingRequest) -> None:
        """Release the data of a request that neither a client nor a replay needs."""
        model = self.own.models[request.model]
        if request.released or not self._was_kept(request) or request.seq in model.window:
            return
        request.released = True
        if request.tokens:
            self._out.append(ReleaseData(model.number, request.first, len(request.tokens)))
        self._keep(request)

    @property
    def is_over(self) -> bool:
        """Whether the run ends and every model is parked."""
        return self._stopping and not any(map(self._parking, self.own.models.values()))

    def _was_kept(self, request: TrainingRequest) -> bool:
        """Whether the result of a request was kept for its client for long enough."""
        age_s = self._now - (request.fetched or request.done)
        return bool(request.done) and age_s > (FETCHED_S if request.fetched else KEEP_S)

    # ---- calls of the workers

    def _next(self) -> None:
        """Make the next call if the workers are free, and settle what needs no call."""
        while self._settle_without_call():
            continue
        if not self._ready or self._calling is not None:
            self._write()
            return
        calls: dict[str, dict[str, WorkerCall]] = {}
        for model in self.own.models.values():
            if (call := self._call_of(model)) is not None:
                calls.setdefault(model.key, {})[model.id] = call
        if calls:
            self._begin(calls)
        self._write()

    def _begin(self, calls: dict[str, dict[str, WorkerCall]]) -> None:
        """Choose among the next calls of all models, by key."""
        chosen: dict[str, WorkerCall] = {}
        for key, of_key in calls.items():
            turns = self._models.setdefault(key, FairTurns(QUANTUM_TOKENS))
            chosen[key] = of_key[turns.pick({name: _cost(call) for name, call in of_key.items()})]
        key = self._keys.pick({key: _cost(call) for key, call in chosen.items()})
        call = chosen[key]
        self._keys.spend(key, _cost(call))
        self._models[key].spend(call.model, _cost(call))
        self._calling = call
        self._write()
        self._out.append(call)

    def _call_of(self, model: Model) -> WorkerCall | None:
        """Return the next call that a model needs, or None."""
        if self._stopping:
            return self._parking(model)
        if model.closed or model.lost:
            return None
        request = self._waiting(model)
        if request is None:
            return WorkerCall(Step.PARK, model.id) if self._is_idle(model) else None
        if request.kind == RequestKind.CREATE:
            return self._room_for(model) or WorkerCall(Step.RUN, model.id, request)
        if model.id not in self._open:
            return (self._room_for(model) if model.parked else None) or WorkerCall(Step.OPEN, model.id)
        if replay := self._replay.get(model.id):
            return self._piece(self.requests[f"{model.id}/{replay[0]}"], Step.REPLAY)
        if request.kind in PASSES:
            return self._piece(
                request, Step.RUN, forward_only=request.kind == RequestKind.FORWARD or bool(model.spoiled)
            )
        return WorkerCall(Step.RUN, model.id, request)

    def _waiting(self, model: Model) -> TrainingRequest | None:
        return self.requests.get(f"{model.id}/{model.reached + 1}")

    def _piece(self, request: TrainingRequest, step: Step, *, forward_only: bool = False) -> WorkerCall:
        done = self._progress.get(request.id, 0)
        start, end = next(piece for piece in pieces(request.tokens, QUANTUM_TOKENS) if piece[0] == done)
        last = end == len(request.tokens)
        return WorkerCall(step, request.model, request, (start, end), forward_only=forward_only, last=last)

    def _is_idle(self, model: Model) -> bool:
        session = self.own.sessions.get(model.session)
        seen = session.seen if session is not None else model.used
        exists = model.steps >= 0 and not model.parked
        return exists and model.id in self._open and self._now - max(seen, model.used) > IDLE_S

    def _parking(self, model: Model) -> WorkerCall | None:
        """Return the call that brings a model closer to being parked, or None if it is."""
        if model.steps < 0 or model.parked or model.closed or model.lost:
            return None
        return WorkerCall(Step.PARK if model.id in self._open else Step.OPEN, model.id)

    def _room_for(self, model: Model) -> WorkerCall | None:
        """Return the call that parks another model if `model` would be one too many, or None."""
        there = [
            one for one in self.own.models.values() if one.steps >= 0 and not (one.parked or one.closed or one.lost)
        ]
        others = [one for one in there if one is not model]
        if len(others) < self._max_models:
            return None
        return self._parking(min(others, key=lambda one: (self._waiting(one) is not None, one.used)))

    def _settle_without_call(self) -> bool:
        """Fail a request that the workers need not see. Return whether there was one."""
        for model in self.own.models.values():
            request = self._waiting(model)
            if request is None or (self._calling is not None and self._calling.model == model.id):
                continue
            if request.refused:
                self._fail(model, request, request.refused, Category.USER)
            elif model.lost:
                self._fail(model, request, model.lost, Category.SERVER)
            elif model.closed:
                self._fail(model, request, f"model {model.id} was unloaded", Category.USER)
            elif model.spoiled and request.kind == RequestKind.OPTIM_STEP:
                self._fail(model, request, f"no step was taken: {model.spoiled}", Category.USER)
            else:
                continue
            return True
        return False

    # ---- what came of a call

    def _returned(self, event: CallDone) -> None:
        call, self._calling = event.call, None
        model = self.own.models[call.model]
        request = call.request
        if call.step == Step.OPEN:
            self._open.add(model.id)
            self._replay[model.id] = list(model.window)
            if model.parked:
                model.parked = False
                self._keep(model)
        elif call.step == Step.PARK:
            self._open.discard(model.id)
            model.parked = True
            self._keep(model)
        elif request is not None and call.step == Step.REPLAY:
            self._progress[request.id] = call.piece[1]
            if call.last:
                del self._progress[request.id]
                self._replay[model.id].pop(0)
        elif request is not None:
            for name, value in event.sums.items():
                request.sums[name] = request.sums.get(name, 0.0) + value
            if event.part is not None:
                request.parts.append(event.part)
            if call.last:
                self._finish(model, request, event)
            else:
                self._progress[request.id] = call.piece[1]

    def _finish(self, model: Model, request: TrainingRequest, event: CallDone) -> None:
        self._progress.pop(request.id, None)
        match request.kind:
            case RequestKind.CREATE:
                model.steps = 0
                self._open.add(model.id)
            case RequestKind.FORWARD_BACKWARD:
                if not event.call.forward_only:
                    model.window.append(request.seq)
            case RequestKind.OPTIM_STEP | RequestKind.LOAD:
                model.steps = max(model.steps, -1) + 1
                self._open.add(model.id)
                self._close_window(model)
            case RequestKind.SAVE | RequestKind.SAVE_SAMPLER:
                self._saved(model, request, event)
            case RequestKind.UNLOAD:
                model.closed = True
                self._open.discard(model.id)
                self._close_window(model)
            case RequestKind.FORWARD:
                pass
            case _ as unreachable:
                assert_never(unreachable)
        self._end(model, request)

    def _end(self, model: Model, request: TrainingRequest) -> None:
        """Count a request as done."""
        model.reached, request.done = request.seq, self._now
        self._gaps.pop(model.id, None)
        self._keep(model, request)
        self._out.append(Settle(request.id))
        if not request.tokens:
            request.released = True

    def _fail(self, model: Model, request: TrainingRequest, message: str, category: Category) -> None:
        self._progress.pop(request.id, None)
        request.error, request.category, request.sums, request.parts = message, category, {}, []
        match request.kind:
            case RequestKind.FORWARD_BACKWARD:
                model.spoiled = model.spoiled or f"forward_backward with seq_id {request.seq} failed: {message}"
                self._drop_gradient(model)
            case RequestKind.OPTIM_STEP | RequestKind.LOAD:
                self._drop_gradient(model)
                model.spoiled = ""
            case RequestKind.CREATE:
                model.lost = message
            case _:
                pass
        self._end(model, request)

    def _drop_gradient(self, model: Model) -> None:
        """Forget the gradient since the last change. The model is opened again as it was then."""
        self._open.discard(model.id)
        self._close_window(model, spoiled=model.spoiled)

    def _close_window(self, model: Model, spoiled: str = "") -> None:
        numbers, model.window, model.spoiled = model.window, [], spoiled
        self._replay.pop(model.id, None)
        for seq in numbers:
            if (request := self.requests.get(f"{model.id}/{seq}")) is not None:
                self._release(request)

    def _saved(self, model: Model, request: TrainingRequest, event: CallDone) -> None:
        """Record the checkpoint or the published weights that a request has made."""
        for record in saved_by(model, request, event, self._now):
            self.own.put(record)
            self._keep(record)
        self._drop_versions()

    def _drop_versions(self) -> None:
        for version in self.own.unneeded_versions():
            del self.own.versions[version.id]
            self._drop(version)
            self._out.append(ReleaseVersion(version.ref))

    def _refuse(self, event: CallRefused) -> None:
        call, self._calling = event.call, None
        model = self.own.models[call.model]
        if call.request is not None and call.step == Step.RUN:
            self._fail(model, call.request, event.message, event.category)
        elif call.request is not None and call.step == Step.REPLAY:
            self._progress.pop(call.request.id, None)
            model.spoiled = f"a gradient was lost with a process and cannot be computed again: {event.message}"
            self._drop_gradient(model)
            self._keep(model)
        else:
            if call.step == Step.OPEN:
                model.lost = (
                    f"the model's state cannot be loaded: {event.message}; load a checkpoint into another model"
                )
            model.used = self._now  # a model that cannot be parked stays where it is
            self._keep(model)

    def _gone(self) -> None:
        """Begin again with what was in progress, once the workers are ready."""
        begun = set(self._progress)
        if self._calling is not None and self._calling.request is not None:
            begun.add(self._calling.request.id)
        for request in (self.requests[name] for name in begun):
            if not request.done:  # the result of a request whose gradient is computed again was answered
                request.sums, request.parts = {}, []
        self._progress.clear()
        self._calling, self._ready = None, False
        self._open.clear()
        self._replay.clear()

    # ---- time

    def _tick(self) -> None:
        self._drop_versions()
        for model in list(self.own.models.values()):
            self._watch_gap(model)
        for request in list(self.requests.values()):
            if not request.done:
                continue
            self._release(request)
            if request.released and self._was_kept(request):
                del self.requests[request.id]
                self._drop(request)
        for checkpoint in list(self.own.checkpoints.values()):
            if checkpoint.expires is not None and checkpoint.expires < self._now:
                self._delete(checkpoint)

    def _watch_gap(self, model: Model) -> None:
        """Fail a number that the client does not send although it has sent later ones."""
        missing = model.reached + 1
        later = [one for one in self.requests.values() if one.model == model.id and one.seq > missing]
        if not later or self._waiting(model) is not None or model.closed:
            self._gaps.pop(model.id, None)
            return
        since = self._gaps.setdefault(model.id, self._now)
        if self._now - since > GAP_S:
            request = TrainingRequest(model=model.id, seq=missing, kind=RequestKind.FORWARD_BACKWARD, at=self._now)
            self.requests[request.id] = request
            message = f"seq_id {missing} did not arrive within {GAP_S:.0f} s, but later ones did"
            self._fail(model, request, message, Category.USER)

    def _delete(self, checkpoint: SavedWeights) -> None:
        del self.own.checkpoints[checkpoint.path]
        self._drop(checkpoint)
        self._drop_versions()
        self._out.append(RemoveFolder(checkpoint.folder))

    # ---- the journal

    def _keep(self, *records: Belonging | TrainingRequest) -> None:
        for record in records:
            self._kept[id(record)] = record

    def _drop(self, record: Record) -> None:
        self._kept.pop(id(record), None)
        self._out.append(Commit(dropped=((kind_of(record), record.id),)))

    def _write(self) -> None:
        """Put what has changed in front of the effects that depend on it."""
        if self._kept:
            self._out.insert(0, Commit(kept=tuple(self._kept.values())))
            self._kept = {}


def _cost(call: WorkerCall) -> int:
    if call.request is None or not call.request.tokens:
        return CALL_TOKENS
    return min(max(sum(call.request.tokens[slice(*call.piece)]), 1), QUANTUM_TOKENS)
