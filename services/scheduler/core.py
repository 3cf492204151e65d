"""The durable state of a run: everything that the journal rebuilds. Pure: no clock, no I/O, no open calls.

Each verb is one durable event. It raises RpcError before it changes anything, so a refused request leaves no trace.
Replaying the same verbs in the same order gives the same state, bit for bit. Heartbeats, time and waiting calls are
therefore handled in `state.py`.
"""

from __future__ import annotations

from typing import Any, cast

from proto import codec
from proto.messages import (
    CheckpointSaved,
    CommitStep,
    Complete,
    FinishRun,
    GetRunInfo,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    PublishWeights,
    Register,
)
from services.scheduler.accepting import Accepting
from services.scheduler.events import (
    Cleared,
    Configure,
    Durable,
    Leased,
    LeaseExpired,
    StoreGone,
)
from services.scheduler.ledger import DEATH
from services.scheduler.store_loss import StoreLoss
from services.scheduler.stores import STORE
from shared.rundir import service_name


class Core(Accepting, StoreLoss):
    """All verbs, and the single entry point for live and replayed events."""

    def apply(self, event: Durable) -> Any:
        """Carry out one durable event, live or replayed, and return the result of its verb.

        Raises RpcError, without any change, if the event is refused. None and False mean that nothing changed and the
        event is not to be journaled.
        """
        result = self._dispatch(event)
        if result is not None and result is not False:
            self._admit()
        return result

    def apply_lease(self, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        """Do the same as `apply(Leased(...))` for a request that is not encoded."""
        grant = self.lease(request, call)
        if grant is not None:
            self._admit()
        return grant

    def _dispatch(self, event: Durable) -> Any:
        match event:
            case Leased():
                return self.lease(cast(LeaseRequest, codec.decode_body(LeaseRequest.TYPE, event.request)), event.call)
            case Complete():
                return self.complete(event)
            case Cleared():
                return self.cleared(event.store, event.count)
            case LeaseExpired():
                return self.expire(event)
            case StoreGone():
                return self.part_with(event.store)
            case NextBatch():
                return self.form_batch(event)
            case CommitStep():
                return self.commit(event)
            case PublishWeights():
                return self.publish(event)
            case CheckpointSaved():
                return self.checkpoint(event)
            case GetRunInfo():
                return self.run_info(event)
            case Register():
                return self.register(event)
            case Configure():
                return self.configure(event)
            case FinishRun():
                return self.finish(event)
        raise TypeError(f"{type(event).__name__} is not a durable event")

    def configure(self, event: Configure) -> bool:
        self.config = event
        self.broken = ""  # a resumed run may have been given more attempts
        self.finished = self.finished and self.committed_step >= event.steps
        self._write_rows()
        return True

    def register(self, request: Register) -> bool:
        """Register a life of an instance. The leases of its previous life are given up at once."""
        holder = (request.service, request.instance)
        old = self.registry.get(holder)
        if old is None or old.incarnation != request.incarnation:
            for lease in self.leases.held_by(holder):
                if lease.incarnation != request.incarnation:
                    self._give_up(lease, DEATH)
        self.registry[holder] = request
        if request.service == STORE:
            if self.lost_data(old, request):
                self.come_back_empty(service_name(*holder))
            self.clears.add_store(service_name(*holder))
        return True
