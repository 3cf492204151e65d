"""A teacher on a server scores as the same model does here, and waits, or refuses, when the server does not answer as
it must."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proto.messages import ErrorCode
from services.reference.away import Away
from services.reference.frozen import FrozenTorch
from services.reference.frozen_server import FrozenServer
from shared.model.picks import Likeliest
from shared.rpc.errors import BadInput, RpcError
from shared.topology.passes import FASTEST
from shared.topology.reward import RewardRetry
from shared.topology.services import TeacherServer
from tests.teacher_server import MODEL, TeacherOnServer, teacher_on_server
from tests.unit.tiny_models import ragged

RETRY = RewardRetry(limit_s=60.0, backoff_s=0.05, max_backoff_s=0.1)


@pytest.fixture(scope="module")
def running() -> Iterator[TeacherOnServer]:
    with teacher_on_server() as teacher:
        yield teacher


@pytest.fixture
def server(running: TeacherOnServer) -> Iterator[TeacherOnServer]:
    """The server, which answers well before and after the test."""
    yield running
    running.status, running.stalls_s, running.logits, running.drops, running.shift = 200, 0.0, False, 0, 0
    running.stop()
    running.start()


def ignore() -> None:
    """Do nothing."""


def frozen(server: TeacherOnServer, retry: RewardRetry = RETRY, **options: Any) -> FrozenServer:
    settings = TeacherServer(base_url=server.url)
    return FrozenServer(settings, MODEL, retry=retry, away=Away(retry.limit_s), **options)


def arrays() -> tuple[Any, Any, Any]:
    ids, lengths, mask = ragged(tasks=2)
    return ids % 60, lengths, mask


@pytest.mark.parametrize("likeliest", [None, Likeliest(5, 40)])
def test_a_model_on_a_server_scores_as_it_does_here(server: TeacherOnServer, likeliest: Likeliest | None) -> None:
    ids, lengths, mask = arrays()
    here, there = FrozenTorch(MODEL, "float32", 4096, passes=FASTEST), frozen(server, likeliest=likeliest)
    here.load()
    there.load()
    if likeliest is None:
        wanted = here.logprobs(ids, lengths, mask, 1.0, ignore)
        found = there.logprobs(ids, lengths, mask, 1.0, ignore)
        assert found.dtype == np.float32
        assert np.abs(found - wanted).max() < 1e-4
        assert not found[mask == 0].any()
        return
    # The server names the five likeliest of its vocabulary, and here those of the first 40 ids count.
    chosen, values = there.likeliest(ids, lengths, mask, 1.0, likeliest, ignore)
    own, expected = here.likeliest(ids, lengths, mask, 1.0, likeliest, ignore)
    named = values > -99
    assert chosen.shape == own.shape == (np.count_nonzero(mask), 5)
    assert chosen.max() < 40
    assert named[:, 0].mean() > 0.5
    assert all(len(set(row)) == 5 for row in chosen.tolist())
    first = named.sum(axis=1)
    for row, count in enumerate(first.tolist()):
        assert np.abs(values[row, :count] - expected[row, :count]).max(initial=0.0) < 1e-4


@pytest.mark.parametrize("how", ["dies", "busy", "broken"])
def test_a_server_that_is_away_is_asked_again_until_it_answers(server: TeacherOnServer, how: str) -> None:
    ids, lengths, mask = arrays()
    there, waited = frozen(server), list[bool]()
    there.load()
    wanted = there.logprobs(ids, lengths, mask, 1.0, ignore)
    if how == "dies":
        server.stop()
    else:
        server.status = 429 if how == "busy" else 503
    back = threading.Timer(1.5, server.start if how == "dies" else lambda: setattr(server, "status", 200))
    back.start()
    found = there.logprobs(ids, lengths, mask, 1.0, lambda: waited.append(there.away.silence is not None))
    assert any(waited)
    assert there.away.silence is None
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("asked", "kept"), [("1", True), ("soon", False), ("100000", True)])
def test_a_server_is_not_asked_again_before_the_pause_that_it_asks_for(
    asked: str, kept: bool, server: TeacherOnServer
) -> None:
    """The pause is limited by `reward.retry.limit_s`, here 1.5 s."""
    there = frozen(server, retry=RewardRetry(limit_s=1.5, backoff_s=0.05, max_backoff_s=0.1))
    there.load()
    server.status, server.retry_after, before = 429, asked, server.requests
    threading.Timer(0.7, setattr, (server, "status", 200)).start()
    ids, lengths, mask = arrays()
    one = slice(None, int(lengths[0]))
    there.logprobs(ids[one], lengths[:1], mask[one], 1.0, lambda: None)
    assert (server.requests - before == 2) == kept


def test_a_stalled_server_counts_as_away_and_the_work_can_be_given_up_meanwhile(server: TeacherOnServer) -> None:
    ids, lengths, mask = arrays()
    there = frozen(server, silence_s=0.5)
    there.load()
    server.stalls_s = 3.0
    began = time.monotonic()

    def give_up() -> None:
        if there.away.silence is not None:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        there.logprobs(ids, lengths, mask, 1.0, give_up)
    assert time.monotonic() - began < 3.0
    assert there.away.silence is not None
    assert "silent for 0.5 s" in there.away.silence.error


def test_after_the_limit_the_run_is_told_to_end(server: TeacherOnServer) -> None:
    now = [0.0]
    away = Away(10.0, lambda: now[0])
    away.refused("no connection")
    now[0] = 10.0
    assert away.over() == ""
    now[0] = 10.1
    away.refused("HTTP 503")
    assert away.over().startswith("the teacher's server has not answered for 10 s (reward.retry.limit_s) in 2 tries")
    away.answered()
    assert away.over() == ""
    server.stop()
    with pytest.raises(BadInput, match="has not answered for 0 s"):
        frozen(server, RewardRetry(limit_s=0.0, backoff_s=0.05)).load()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logits": True}, "numbers that are no log-probs .* start vLLM without --logprobs-mode"),
        ({"drops": 1}, r"returned \d+ log-probs for a prompt of \d+ tokens"),
        ({"shift": 1}, "token .* in the policy's tokenizer and .* in the teacher's; token .*; token .*; serve a model"),
        ({"status": 404}, "HTTP 404"),
    ],
)
def test_the_probe_refuses_a_server_that_is_no_teacher(
    server: TeacherOnServer, change: dict[str, Any], why: str
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(BadInput, match=why) as caught:
        frozen(server).load()
    assert "\n" not in str(caught.value)


def test_the_option_for_a_larger_top_k_is_named(server: TeacherOnServer) -> None:
    with pytest.raises(BadInput, match=r"start vLLM with --max-logprobs 30, or lower algorithm\.distill\.top_k"):
        frozen(server, likeliest=Likeliest(30, 60)).load()


def test_a_model_that_is_not_served_is_refused_with_those_that_are(server: TeacherOnServer) -> None:
    settings = TeacherServer(base_url=server.url, model="other")
    made = FrozenServer(settings, MODEL, retry=RETRY, away=Away(60.0))
    with pytest.raises(BadInput, match=r"server\.model: other is not on the server; use one of teacher"):
        made.load()


def test_an_api_key_that_is_not_set_is_refused_by_name(server: TeacherOnServer) -> None:
    settings = TeacherServer(base_url=server.url, api_key_env="RLBUS_NO_SUCH_KEY")
    with pytest.raises(BadInput, match="the variable RLBUS_NO_SUCH_KEY is not set"):
        FrozenServer(settings, MODEL, retry=RETRY, away=Away(60.0))


def test_a_wrong_count_of_log_probs_is_bad_data_so_that_the_lease_is_handed_back(server: TeacherOnServer) -> None:
    ids, lengths, mask = arrays()
    there = frozen(server)
    there.load()
    server.drops = 2
    with pytest.raises(RpcError) as caught:
        there.logprobs(ids, lengths, mask, 1.0, ignore)
    assert caught.value.code == ErrorCode.BAD_DATA
    assert not isinstance(caught.value, BadInput)
    server.drops, server.status = 0, 401
    with pytest.raises(BadInput, match="HTTP 401"):
        there.logprobs(ids, lengths, mask, 1.0, ignore)
