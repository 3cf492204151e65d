"""The registered life of every instance, what it last reported, and checks of these reports. The module is pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from proto.messages import ErrorCode, Heartbeat, Register, Trouble
from services.scheduler.leases import Holder
from shared.actor.service import ProcessState
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.topology import TRAINER_STORE
from shared.topology.models import WORKERS

STORE = "batch-store"
RANKS = frozenset(WORKERS.values())
"""Services whose processes put shards outside leases: the ranks of trained models."""
MOST_INSTANCES = 16_384
"""Maximum number of registered instances."""
MOST_STORES = 512
"""Maximum number of registered stores. The scheduler and the stores have a socket for each; a process has 1,023."""
MOST_TEXT = 1024
"""Maximum number of characters in each string that a service reports. The status of a run holds all of them."""
MOST = 1 << 50
"""Maximum bytes (one pebibyte) or shards of one store."""
GONE_S = 120.0
"""Seconds of silence after which a process counts as gone if its end cannot be confirmed (its host may be gone, too).
The scheduler does not give up on the trainer's store, because the run needs that store and the run's own supervisor
restarts it."""
ABSENT_S = 3.0
"""Seconds without a heartbeat after which a store is no longer named to other stores as a source of weights."""
MOST_TROUBLES = 16
"""Maximum number of problems in one heartbeat."""


class Registry(Mapping[Holder, Register]):
    """The last registration of every instance. A lookup for one host does not scan the others."""

    def __init__(self) -> None:
        self._rows: dict[Holder, Register] = {}
        self.stores: dict[str, Register] = {}
        """The stores by name."""
        self._hosts: dict[str, dict[Holder, None]] = {}
        self.ranks: dict[Holder, None] = {}
        """The ranks of trained models."""

    def __getitem__(self, holder: Holder) -> Register:
        return self._rows[holder]

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def on_host(self, host_id: str) -> list[Holder]:
        """Return all instances on a host."""
        return list(self._hosts.get(host_id, ()))

    def check_room(self, holder: Holder) -> None:
        """Raise RpcError(bad_request) if there is no room for one more instance of this kind."""
        name = service_name(*holder)
        if holder not in self._rows and len(self._rows) >= MOST_INSTANCES:
            text = f"{name}: {MOST_INSTANCES} instances are registered, which is the limit; reuse an instance number"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if holder[0] == STORE and name not in self.stores and len(self.stores) >= MOST_STORES:
            text = f"{name}: {MOST_STORES} stores are registered, which is the limit; reuse an instance number"
            raise RpcError(ErrorCode.BAD_REQUEST, text)

    def put(self, row: Register) -> None:
        """Add a registration, which replaces that of an earlier life."""
        holder = (row.service, row.instance)
        old = self._rows.get(holder)
        if old is not None:
            self._leave_host(holder, old)
        self._rows[holder] = row
        self._hosts.setdefault(row.host_id, {})[holder] = None
        if row.service == STORE:
            self.stores[service_name(*holder)] = row
        elif row.service in RANKS:
            self.ranks[holder] = None

    def remove(self, holder: Holder) -> Register | None:
        """Remove and return the registration of an instance, or return None if there is none."""
        row = self._rows.pop(holder, None)
        if row is not None:
            self._leave_host(holder, row)
            self.stores.pop(service_name(*holder), None)
            self.ranks.pop(holder, None)
        return row

    def _leave_host(self, holder: Holder, row: Register) -> None:
        there = self._hosts[row.host_id]
        del there[holder]
        if not there:
            del self._hosts[row.host_id]


@dataclass
class Seen:
    """The last heartbeat of an instance."""

    at: float
    state: str = ProcessState.STARTING
    rss_bytes: int = 0
    store_bytes: int = 0
    store_shards: int = 0
    troubles: list[Trouble] = field(default_factory=list)


class Peers:
    """The last heartbeat of every instance. It dies with this process."""

    def __init__(self) -> None:
        self.seen: dict[Holder, Seen] = {}
        self._ending: dict[Holder, str] = {}
        """The problems that end the run, by the process that reports them."""

    def hear(self, holder: Holder, seen: Seen) -> None:
        self.seen[holder] = seen
        ends = next((trouble.text for trouble in seen.troubles if trouble.ends_run), None)
        if ends is None:
            self._ending.pop(holder, None)
        else:
            self._ending[holder] = ends

    def forget(self, holder: Holder) -> None:
        self.seen.pop(holder, None)
        self._ending.pop(holder, None)

    def is_present(self, holder: Holder, now: float) -> bool:
        return holder in self.seen and now - self.seen[holder].at < ABSENT_S

    def is_silent(self, holder: Holder, now: float) -> bool:
        """Return whether an instance was never heard from in this life, or not for `GONE_S`."""
        return holder not in self.seen or now - self.seen[holder].at > GONE_S

    def silent_stores(self, now: float) -> list[Holder]:
        """Return the stores that are gone for good."""
        return [
            holder
            for holder, seen in self.seen.items()
            if now - seen.at > GONE_S and holder[0] == STORE and service_name(*holder) != TRAINER_STORE
        ]

    def check_troubles(self) -> None:
        """Raise RpcError(bad_data) if a service has given up waiting for something that the tasks need."""
        for holder, text in self._ending.items():
            raise RpcError(ErrorCode.BAD_DATA, f"{service_name(*holder)}: {text}")


def check_numbers(request: Register | Heartbeat) -> None:
    """Raise RpcError(bad_request) if a value is out of range. The error names the service and the value."""
    if isinstance(request, Register):
        numbers = {"limit_bytes": request.limit_bytes}
    else:
        numbers = {"store_bytes": request.store_bytes, "store_shards": request.store_shards}
    texts = [value for value in msgspec.structs.astuple(request) if isinstance(value, str)]
    if isinstance(request, Heartbeat):
        texts += [text for trouble in request.troubles[:MOST_TROUBLES] for text in (trouble.kind, trouble.text)]
    if not 0 <= request.instance < 1 << 31 or any(len(text) > MOST_TEXT for text in texts):
        who = f"{request.service[:64]}/{request.instance}"
        text = f"{who}: instances are counted from 0, and no text may have more than {MOST_TEXT} characters"
        raise RpcError(ErrorCode.BAD_REQUEST, text)
    if isinstance(request, Heartbeat) and len(request.troubles) > MOST_TROUBLES:
        text = f"{service_name(request.service, request.instance)}: {len(request.troubles)} troubles in one heartbeat"
        raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; at most {MOST_TROUBLES} are allowed")
    for name, value in numbers.items():
        if not 0 <= value <= MOST:
            who = service_name(request.service, request.instance)
            raise RpcError(ErrorCode.BAD_REQUEST, f"{who}: {name} {value} is out of range; it must be 0 to {MOST}")
