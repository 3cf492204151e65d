"""Hands the records of an earlier life of a server to those who need them."""

from __future__ import annotations

from services.policy_trainer.tinker.journal import ServerJournal
from services.policy_trainer.tinker.records import Belonging, OpenSample, Stores, TrainingRequest, Version
from services.policy_trainer.tinker.samples import SampleFutures
from services.policy_trainer.tinker.server import Server


def restore(server: Server, samples: SampleFutures, journal: ServerJournal, shm: str) -> None:
    """Let `server` and `samples` continue where the journal ends. `shm` is the run's folder in shared memory.

    The versions of another folder are gone. Raises RpcError(conflict) if the journal cannot be read.
    """
    records: list[Belonging | TrainingRequest] = []
    found, stores = list(journal.records()), Stores(shm=shm)
    if stores not in found:
        journal.write([stores], [("version", one.id) for one in found if isinstance(one, Version)])
        found = [one for one in found if not isinstance(one, Version)]
    for record in found:
        if isinstance(record, OpenSample):
            samples.restore(record)
        elif not isinstance(record, Stores):
            records.append(record)
    server.begin(records)
