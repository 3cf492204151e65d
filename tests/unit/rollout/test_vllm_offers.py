"""Tests the calls that carry out a transfer to vLLM. vLLM itself is not imported."""

from __future__ import annotations

import pytest

from proto.messages import TransferOffer, TransferParameter
from services.rollout.engines.vllm_offer import HalfTaken, OfferTaker
from services.rollout.weights.transfer import TransferFailed
from shared.ranks.meeting import LOOPBACK, Meeting
from shared.topology.services import WeightsRoute

NAMES = "abc"
TABLE = [TransferParameter(name, "float32", [2]) for name in NAMES]
MEETING = Meeting(LOOPBACK)


def part(first: int, left: int = 0) -> TransferOffer:
    return TransferOffer(communicator=1, number=1 + first, deadline_s=5.0, parameters=TABLE, first=first, left=left)


class Worker:
    """The calls of one rank. The call number `fails_at`, counted from 0, fails."""

    def __init__(self, fails_at: int = -1) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at

    def __call__(self, method: str, args: tuple[object, ...] = ()) -> list[str]:
        what = method.removesuffix("_transfer")
        if what == "receive":
            info, within_s, begins = args
            assert isinstance(info, dict)
            what = f"{'begin' if begins else 'go on'} {''.join(info['names'])} {within_s:g}"
        self.calls.append(what)
        return ["broken" if len(self.calls) - 1 == self._fails_at else ""]


def taken(route: WeightsRoute, worker: Worker, *parts: TransferOffer) -> None:
    taker = OfferTaker(route, ranks=1)
    for each in parts:
        taker.take(worker, each, MEETING)


def test_a_version_that_is_sent_at_once_is_received_and_finished() -> None:
    worker = Worker()
    taken("nccl", worker, part(0), part(0))
    assert worker.calls == ["join", "begin abc 5", "finish", "begin abc 5", "finish"]


def test_all_parts_of_a_version_belong_to_one_update_of_the_model() -> None:
    worker = Worker()
    taken("ipc", worker, part(0, left=2), part(1, left=1), part(2))
    assert worker.calls == ["join", "begin a 5", "go on b 5", "go on c 5", "finish"]


@pytest.mark.parametrize(
    ("route", "fails_at", "error"),
    [
        ("ipc", 0, TransferFailed),
        ("ipc", 1, HalfTaken),
        ("ipc", 2, HalfTaken),
        ("gloo", 1, TransferFailed),
        ("gloo", 2, TransferFailed),
        ("gloo", 4, HalfTaken),
    ],
)
def test_the_model_is_intact_until_the_first_part_changes_it_or_with_gloo_the_end(
    route: WeightsRoute, fails_at: int, error: type[Exception]
) -> None:
    with pytest.raises(error, match="broken"):
        taken(route, Worker(fails_at), part(0, left=2), part(1, left=1), part(2))
