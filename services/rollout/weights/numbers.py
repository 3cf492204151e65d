"""The versions of a rollout that samples nothing: the rows have the answers, and a version is only the number that its
leases name. It is not loaded, so there is no drill and no canary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proto.messages import WeightsRef
from services.rollout.sampling.trajectory import BlockVersions
from services.rollout.weights.sync import HeldVersion
from shared.lease import Lease


class NumberedVersions:
    """Takes the place of `EngineVersions` in a rollout without an engine. It is used only on the service's loop."""

    last_sync = None
    side_by_side = False

    def __init__(self) -> None:
        self.holds = HeldVersion()
        """The newest version that a lease has named."""

    async def fetch_ahead(self, lease: Lease) -> None:
        """Do nothing, because there is nothing to load."""

    @asynccontextmanager
    async def bring(self, lease: Lease, *, exact: bool) -> AsyncIterator[BlockVersions]:
        """Yield the version that the lease names, or the newest one if the lease allows it."""
        ref = lease.grant.weights
        if ref is not None:
            named = HeldVersion(ref.lineage, ref.step)
            held = (self.holds.lineage, self.holds.step)
            if exact or held < (ref.lineage, ref.step):
                self.holds = named
        yield BlockVersions(self.holds.step, 0, self.holds.lineage)

    def rest(self) -> None:
        """Do nothing, because there are no devices."""

    def announce(self, ref: WeightsRef) -> None:
        """Do nothing: a later lease names the version."""

    async def run(self) -> None:
        """Wait until cancelled, because no version is loaded into running samples."""
        await asyncio.Event().wait()
