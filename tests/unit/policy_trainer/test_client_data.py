"""Tests what becomes of clients' data and losses before any worker sees them, and which errors of workers mean that the
workers are lost."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from proto.messages import AdapterSpec, ErrorCode, GetWorkerState, HeldSnapshot, PublishModel, WorkerState
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from services.policy_trainer.models import Datum, Models, client_loss, shards_of
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.stages import GIVEN_LOSSES

IDS = np.array([5, 6, 7])
ONES = np.ones(3)


@pytest.mark.parametrize("name", GIVEN_LOSSES)
def test_a_loss_reads_only_what_it_needs_and_has_defaults(name: str) -> None:
    loss = client_loss(name, {"beta": 0.05} if name == "dro" else {})
    datum = Datum(IDS, IDS + 1, weights=ONES, advantages=2 * ONES, logprobs=-ONES)
    own = ["token_weights"] if name == "cross_entropy" else ["token_advantages", "anchor_logprobs"]
    shards = shards_of(datum, loss)
    assert shards.keys() == {"token_ids", "lengths", "target_tokens", *own}
    assert {str(array.dtype) for key, array in shards.items() if key in own} == {"float32"}
    assert (loss.clip_low, loss.clip_high) == ((0.8, 1.2) if name in ("ppo", "cispo") else (0.0, 0.0))
    assert (loss.anchor, loss.temperature, loss.beta) == ("given", 1.0, 0.05 if name == "dro" else 0.0)


def test_weights_are_1_by_default_and_several_targets_lie_one_token_after_the_other() -> None:
    targets = np.array([[1, 2], [3, 4], [5, 6]])
    shards = shards_of(Datum(IDS, targets), client_loss("cross_entropy", {}))
    assert shards["target_tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert shards["token_weights"].tolist() == [1.0] * 6
    assert shards["lengths"].tolist() == [3]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("gspo", {}, "loss_fn 'gspo' is not supported here; pass ppo, or .* forward_backward_custom"),
        ("stable_reinforce", {}, "not supported here; pass loss_fn=importance_sampling"),
        ("custom", {}, "not supported here; call forward_backward_custom"),
        ("nll", {}, "not supported here; use cross_entropy, importance_sampling, ppo, cispo, dro"),
        ("ppo", {"clip": 0.2}, "ppo has no option 'clip'; it has clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 0.2}, "cross_entropy has no option 'beta'; it has none"),
        ("dro", {}, "beta of dro is None; it must be a number"),
        ("cispo", {"clip_high_threshold": float("nan")}, "clip_high_threshold of cispo is nan"),
        ("ppo", {"clip_high_threshold": 0.2}, r"clip_low_threshold 0\.8 is above clip_high_threshold 0\.2"),
    ],
)
def test_losses_and_options_that_do_not_exist_are_refused_with_a_remedy(
    name: str, options: dict[str, float], text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        client_loss(name, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "changes", "text"),
    [
        ("cross_entropy", {"token_ids": np.zeros(0, np.int64)}, r"model_input has shape \[0\]"),
        ("cross_entropy", {"targets": IDS[:2]}, r"target_tokens has shape \[2\], but 3 tokens need \[3\] or \[3, K\]"),
        ("cross_entropy", {"targets": np.zeros((3, 0), np.int64)}, r"target_tokens has shape \[3, 0\]"),
        ("cross_entropy", {"targets": IDS - 6}, "target_tokens must be token ids"),
        ("cross_entropy", {"targets": IDS * 1.5}, "target_tokens must be token ids"),
        ("cross_entropy", {"token_ids": IDS + 2**31}, "model_input must be token ids"),
        ("cross_entropy", {"weights": ONES[:2]}, r"weights has shape \[2\], but target_tokens has \[3\]"),
        ("cross_entropy", {"weights": ONES * np.nan}, "weights has values that are not finite"),
        ("cross_entropy", {"weights": ONES * 1e300}, "weights has values that are not finite numbers of float32"),
        ("ppo", {"advantages": None}, "loss_fn_inputs has no advantages, which ppo needs"),
        ("ppo", {"logprobs": None}, "loss_fn_inputs has no logprobs, which ppo needs"),
        ("ppo", {"targets": np.zeros((3, 2), np.int64)}, r"but ppo has one target per token, \[3\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_the_names_that_clients_know(
    loss: str, changes: dict[str, Any], text: str
) -> None:
    arrays = {"token_ids": IDS, "targets": IDS, "weights": ONES, "advantages": ONES, "logprobs": -ONES}
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=text) as caught:
        shards_of(Datum(**(arrays | changes)), client_loss(loss, {}))
    assert "\n" not in str(caught.value)


class Rank:
    """A client of a worker that answers every call but takeovers with an error."""

    def __init__(self, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self.peer = "policy-trainer-worker/0"
        self.code = code
        self.calls: list[Any] = []

    async def call(self, request: Any, reply: type[Any], *, deadline_s: float) -> Any:
        if isinstance(request, GetWorkerState):
            held = [HeldSnapshot(lineage=0, step=step, model=model) for model, step in ((0, 9), (1, 4), (1, 5), (2, 1))]
            return WorkerState(step=-1, driver=7, order=0, dirty=False, snapshots=held)
        self.calls.append(request)
        raise RpcError(self.code, "refused")


def test_a_takeover_tells_the_newest_snapshot_of_every_model_of_a_client() -> None:
    clients: list[Any] = [Rank()]
    assert asyncio.run(Models(WorkerDispatch(clients, Layout(1), 7)).take_over()) == {1: 5, 2: 1}


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        (ErrorCode.LOST, True),
        (ErrorCode.DRAINING, True),
        (ErrorCode.DEADLINE, True),
        (ErrorCode.MISSING, False),
        (ErrorCode.BAD_DATA, False),
        (ErrorCode.INTERNAL, False),
    ],
)
def test_only_errors_of_the_group_mean_that_the_workers_are_lost(code: ErrorCode, lost: bool) -> None:
    async def scene() -> None:
        clients: list[Any] = [Rank(code)]
        models = Models(WorkerDispatch(clients, Layout(1), 7))
        with pytest.raises(RpcError) as caught:
            await models.open_model(1, AdapterSpec(rank=1, alpha=1.0, seed=0, groups=["mlp"]))
        assert (isinstance(caught.value, WorkersLost), caught.value.code) == (lost, code)

    asyncio.run(scene())


def test_versions_have_higher_fences_after_every_takeover_and_in_every_life_of_the_server() -> None:
    async def scene() -> None:
        fences = []
        for life in (1, 2):
            rank = Rank()
            clients: list[Any] = [rank]
            models = Models(WorkerDispatch(clients, Layout(1), 7))
            for _ in range(2):
                await models.take_over(life)
                await asyncio.gather(models.publish(1, store="batch-store/0"), return_exceptions=True)
            fences += [call.fence for call in rank.calls if isinstance(call, PublishModel)]
        assert len(set(fences)) == 4
        assert fences == sorted(fences)

    asyncio.run(scene())
