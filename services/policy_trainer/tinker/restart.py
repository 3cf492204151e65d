"""Hands the records of an earlier life of a server to those who need them."""

from __future__ import annotations

from services.policy_trainer.tinker.journal import ServerJournal
from services.policy_trainer.tinker.records import Belonging, OpenSample, TrainingRequest
from services.policy_trainer.tinker.samples import SampleFutures
from services.policy_trainer.tinker.server import Server


def restore(server: Server, samples: SampleFutures, journal: ServerJournal) -> None:
    """Let `server` and `samples` continue where the journal ends. Raises RpcError(conflict) if it cannot be read."""
    records: list[Belonging | TrainingRequest] = []
    for record in journal.records():
        if isinstance(record, OpenSample):
            samples.restore(record)
        else:
            records.append(record)
    server.begin(records)
