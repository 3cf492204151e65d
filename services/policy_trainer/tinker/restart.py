"""Hands the records of an earlier life of a server to those who need them."""

from __future__ import annotations

from services.policy_trainer.tinker.journal import ServerJournal
from services.policy_trainer.tinker.records import (
    Belonging,
    OpenSample,
    Record,
    Stores,
    TrainingRequest,
    Version,
    kind_of,
)
from services.policy_trainer.tinker.samples import SampleFutures
from services.policy_trainer.tinker.server import Server


def restore(server: Server, samples: SampleFutures, journal: ServerJournal, shm: str) -> None:
    """Let `server` and `samples` continue where the journal ends, with the stores of the run directory `shm`.

    If the stores were others, their versions are gone. Raises RpcError(conflict) if the journal cannot be read.
    """
    records: list[Belonging | TrainingRequest] = []
    found, stores = list(journal.records()), Stores(shm=shm)
    if stores not in found:
        journal.write([stores], [(kind_of(one), one.id) for one in found if _needs_stores(one)])
        found = [one for one in found if not _needs_stores(one)]
    for record in found:
        if isinstance(record, OpenSample):
            samples.restore(record)
        elif not isinstance(record, Stores):
            records.append(record)
    server.begin(records)


def _needs_stores(record: Record) -> bool:
    """Return whether a record is a version, or a sample from one."""
    return isinstance(record, Version) or (isinstance(record, OpenSample) and record.request.version is not None)
