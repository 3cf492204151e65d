"""Tests how long answers are kept for callers that may repeat their requests."""

from __future__ import annotations

import pytest

from shared.rpc.replies import GRACE_S, SETTLED_BYTES, SETTLED_REPLIES, SETTLED_S, Replies, RequestKey
from shared.security.roles import Role

HOUR_S = 3600.0


def key(number: int) -> RequestKey:
    return RequestKey(Role.SERVICE, 1, number)


def test_an_answer_is_kept_until_its_caller_has_given_up() -> None:
    replies = Replies()
    replies.keep(key(1), 7, [b"a"], now=0.0, deadline=10.0)
    replies.keep(key(2), 8, [b"b"], now=10.0 + GRACE_S - 1, deadline=20.0)
    assert replies.get(key(1)) == (7, [b"a"])
    replies.keep(key(3), 9, [b"c"], now=10.0 + GRACE_S, deadline=20.0)
    assert replies.get(key(1)) is None
    assert replies.nbytes == 2


@pytest.mark.parametrize(("size", "most"), [(8, SETTLED_REPLIES), (100_000, SETTLED_BYTES // 100_000)])
def test_answers_whose_callers_wait_for_an_hour_do_not_accumulate(size: int, most: int) -> None:
    replies = Replies()
    per_s = 4
    for number in range(per_s * 600):
        replies.keep(key(number), number, [bytes(size)], now=number / per_s, deadline=number / per_s + HOUR_S)
    recent = int(per_s * SETTLED_S)
    assert len(replies) <= max(most, recent) + 1
    assert len(replies._ends) <= 2 * len(replies) + SETTLED_REPLIES + 1
    assert replies.nbytes == size * len(replies)


def test_an_answer_that_its_caller_may_have_missed_is_kept_however_many_follow() -> None:
    replies = Replies()
    for number in range(2 * SETTLED_REPLIES):
        replies.keep(key(number), number, [bytes(SETTLED_BYTES // 100)], now=SETTLED_S * number / 1000, deadline=HOUR_S)
    assert replies.get(key(0)) is not None
    assert len(replies) == 2 * SETTLED_REPLIES
