"""Holds the registered life of every instance, indexed by instance, by store and by host. The module is pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proto.messages import ErrorCode, Register
from services.scheduler.leases import Holder
from services.scheduler.stores import RANK, STORE
from shared.rpc.errors import RpcError
from shared.rundir import service_name

MOST_INSTANCES = 16_384
"""Maximum number of registered instances."""
MOST_STORES = 512
"""Maximum number of registered stores. The scheduler and the stores have a socket for each; a process has 1,023."""


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
