"""A lease's progress: the compute thread's until it is computed, then only its own."""

from __future__ import annotations

import pytest

from proto.messages import BatchMeta, LeaseGrant
from shared.lease import Lease, LeaseLost


def grant() -> LeaseGrant:
    return LeaseGrant(lease_id=7, stage="rollout", split="train", lease_s=30, batch=BatchMeta(tasks=[]))


def test_a_waiting_lease_is_renewed_by_the_block_before_it_and_a_computed_one_is_not() -> None:
    counter = [10]
    lease = Lease(grant(), lambda: counter[0])
    assert lease.progress == 10
    counter[0] = 15
    assert lease.progress == 15
    lease.computed()
    counter[0] = 99  # the next block computes: a lease stuck in its rewards must not live from that
    assert lease.progress == 15
    lease.advance()
    assert lease.progress == 16


def test_a_cancelled_lease_says_so() -> None:
    lease = Lease(grant(), lambda: 0)
    lease.check()
    lease.cancel.set()
    with pytest.raises(LeaseLost, match="lease 7"):
        lease.check()
