"""The registered life of every instance, and checks of what a peer reports about itself. The module is pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from proto.messages import ErrorCode, Heartbeat, Register
from services.scheduler.leases import Holder
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.topology.models import POLICY_WORKER

STORE, RANK = "batch-store", POLICY_WORKER
MOST_INSTANCES = 16_384
"""Maximum number of registered instances."""
MOST_STORES = 512
"""Maximum number of registered stores. The scheduler and the stores have a socket for each; a process has 1,023."""
MOST_TEXT = 1024
"""Maximum number of characters in each string that a service reports. The status of a run holds all of them."""
MOST = 1 << 50
"""Maximum bytes (one pebibyte) or shards of one store."""
MOST_TROUBLES = 16
"""Maximum number of problems in one heartbeat."""


class Registry(Mapping[Holder, Register]):
    """The last registration of every instance. A lookup for one host does not scan the others."""

    def __init__(self) -> None:
        self._rows: dict[Holder, Register] = {}
        self._stores: dict[str, Register] = {}
        self._hosts: dict[str, dict[Holder, None]] = {}
        self.ranks: dict[Holder, None] = {}
        """The trainer ranks."""

    def __getitem__(self, holder: Holder) -> Register:
        return self._rows[holder]

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def stores(self) -> Mapping[str, Register]:
        """The stores by name."""
        return self._stores

    def on_host(self, host_id: str) -> list[Holder]:
        """Return all instances on a host."""
        return list(self._hosts.get(host_id, ()))

    def check_room(self, holder: Holder) -> None:
        """Raise RpcError(bad_request) if there is no room for one more instance of this kind."""
        name = service_name(*holder)
        if holder not in self._rows and len(self._rows) >= MOST_INSTANCES:
            text = f"{name}: {MOST_INSTANCES} instances are registered, which is the limit; reuse an instance number"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if holder[0] == STORE and name not in self._stores and len(self._stores) >= MOST_STORES:
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
            self._stores[service_name(*holder)] = row
        elif row.service == RANK:
            self.ranks[holder] = None

    def remove(self, holder: Holder) -> Register | None:
        """Remove and return the registration of an instance, or return None if there is none."""
        row = self._rows.pop(holder, None)
        if row is not None:
            self._leave_host(holder, row)
            self._stores.pop(service_name(*holder), None)
            self.ranks.pop(holder, None)
        return row

    def _leave_host(self, holder: Holder, row: Register) -> None:
        there = self._hosts[row.host_id]
        del there[holder]
        if not there:
            del self._hosts[row.host_id]


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
