"""Tests which engine gets a request to sample, and what becomes of the requests of an engine that dies."""

from __future__ import annotations

import numpy as np
import pytest

from proto.messages import ErrorCode
from services.policy_trainer.sampling.request import derived_seed
from services.policy_trainer.sampling.router import (
    BLOCK,
    MAX_DEATHS,
    PATIENCE_S,
    SILENT_S,
    SLACK,
    EngineFull,
    EngineLeft,
    EngineSeen,
    FailSample,
    RecallSample,
    Router,
    RouterEffect,
    RouterTick,
    SampleAsked,
    SampleEnded,
    SendSample,
    blocks_of,
)

PROMPT = np.arange(3 * BLOCK, dtype=np.int32)


def router(engines: int = 2) -> Router:
    """Return a router whose engines are there."""
    made = Router(engines)
    for engine in range(engines):
        made.handle(EngineSeen(engine, 100 + engine, True), 0.0)
    return made


def sent_to(effects: list[RouterEffect]) -> int:
    (send,) = effects
    assert isinstance(send, SendSample)
    return send.engine


def failed(effects: list[RouterEffect]) -> FailSample:
    (fail,) = effects
    assert isinstance(fail, FailSample)
    return fail


def test_requests_go_to_the_engine_with_the_lowest_load() -> None:
    made = router()
    engines = [sent_to(made.handle(SampleAsked(number, f"v{number}", SLACK + 1), 0.0)) for number in range(4)]
    assert engines.count(0) == engines.count(1) == 2
    made.handle(SampleEnded(1), 1.0)
    assert sent_to(made.handle(SampleAsked(9, "v9", 1), 1.0)) == engines[1]


def test_the_engine_that_knows_the_longest_prefix_is_preferred_until_its_load_is_too_high() -> None:
    made = router()
    first = sent_to(made.handle(SampleAsked(0, "v", 1, blocks_of("v", PROMPT)), 0.0))
    longer = np.concatenate([PROMPT, PROMPT])
    assert sent_to(made.handle(SampleAsked(1, "v", SLACK, blocks_of("v", longer)), 0.0)) == first
    assert sent_to(made.handle(SampleAsked(2, "v", 1, blocks_of("v", PROMPT)), 0.0)) != first


def test_the_blocks_of_prompts_agree_up_to_the_first_different_token_of_one_version() -> None:
    other = PROMPT.copy()
    other[2 * BLOCK] += 1
    one, two = blocks_of("v", PROMPT), blocks_of("v", other)
    assert len(one) == 3
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert not set(one) & set(blocks_of("w", PROMPT))


def test_the_engine_that_holds_the_version_is_preferred() -> None:
    made = router()
    first = sent_to(made.handle(SampleAsked(0, "v", 1), 0.0))
    assert sent_to(made.handle(SampleAsked(1, "v", 1), 0.0)) == first
    assert sent_to(made.handle(SampleAsked(2, "w", 1), 0.0)) != first


def test_a_request_goes_to_another_engine_if_one_is_full_and_ends_if_all_are() -> None:
    made = router()
    first = sent_to(made.handle(SampleAsked(0, "v", 1), 0.0))
    assert sent_to(made.handle(EngineFull(0, "rollout/0 is full"), 0.0)) == 1 - first
    fail = failed(made.handle(EngineFull(0, "rollout/1 is full"), 0.0))
    assert fail.code == ErrorCode.BUSY
    assert fail.retry_after_s > 0
    assert fail.why == "rollout/0 is full; rollout/1 is full"
    assert not made.open


@pytest.mark.parametrize("how", ["restarted", "silent"])
def test_the_requests_of_a_dead_engine_go_to_another_one(how: str) -> None:
    made = router()
    engine = sent_to(made.handle(SampleAsked(0, "v", 5), 0.0))
    if how == "restarted":
        effects = made.handle(EngineSeen(engine, 200, False), 1.0)
    else:
        made.handle(EngineSeen(1 - engine, 100 + 1 - engine, True), SILENT_S)
        effects = made.handle(RouterTick(), SILENT_S + 1)
    assert effects == [RecallSample(0, engine), SendSample(0, 1 - engine)]
    # The answer of the first call no longer counts, and nothing is left of its load.
    made.handle(SampleEnded(0), 2.0)
    made.handle(EngineSeen(engine, 200, True), SILENT_S + 2)
    assert made.ready == sorted(made.ready)


def test_a_request_waits_for_an_engine_and_ends_if_none_is_there() -> None:
    made = Router(1)
    assert made.handle(SampleAsked(0, "v", 1), 0.0) == []
    assert made.handle(EngineSeen(0, 1, False), PATIENCE_S + 1) == []  # it is starting
    assert made.handle(EngineSeen(0, 1, True), PATIENCE_S + 2) == [SendSample(0, 0)]
    late = PATIENCE_S + 2 + SILENT_S + 1
    assert made.handle(RouterTick(), late) == [RecallSample(0, 0)]
    assert made.handle(RouterTick(), late + PATIENCE_S - 1) == []
    fail = failed(made.handle(RouterTick(), late + PATIENCE_S))
    assert fail.code == ErrorCode.LOST
    assert "no engine was there" in fail.why


def test_a_request_that_kills_engines_ends_with_an_error_of_its_own() -> None:
    made = router(1)
    made.handle(SampleAsked(0, "v", 1), 0.0)
    for life in range(MAX_DEATHS):
        assert made.handle(EngineSeen(0, 200 + life, True), 1.0) == [RecallSample(0, 0), SendSample(0, 0)]
    effects = made.handle(EngineLeft(0, died=True), 2.0)
    assert failed(effects).code == ErrorCode.LOST
    assert f"{MAX_DEATHS + 1} engines died" in failed(effects).why


def test_an_engine_that_is_starting_or_ending_gets_its_request_back_when_it_is_ready() -> None:
    made = router(1)
    made.handle(SampleAsked(0, "v", 1), 0.0)
    for _ in range(10):
        assert made.handle(EngineLeft(0), 1.0) == []
        assert made.handle(EngineSeen(0, 100, True), 1.5) == [SendSample(0, 0)]


def test_events_of_requests_that_are_no_longer_open_change_nothing() -> None:
    made = router()
    made.handle(SampleAsked(0, "v", 1), 0.0)
    made.handle(SampleEnded(0), 0.0)
    for event in (SampleEnded(0), EngineFull(0, ""), EngineLeft(0, died=True)):
        assert made.handle(event, 1.0) == []
    assert made.ready == [0, 1]


def test_a_derived_seed_depends_on_everything_that_names_a_sample() -> None:
    seeds = {
        derived_seed(*arguments)
        for arguments in [
            ("m", "1", 1, 1),
            ("m", "2", 1, 1),
            ("m", "", 1, 1),
            ("n", "1", 1, 1),
            ("m", "1", 2, 1),
            ("m", "1", 1, 2),
        ]
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derived_seed("m", "1", 1, 1) == derived_seed("m", "1", 1, 1)


@pytest.mark.parametrize("seed", range(30))
def test_every_request_has_one_call_at_most_and_ends_once_whatever_happens(seed: int) -> None:
    """Engines die, hang, refuse and come back at random."""
    random = np.random.default_rng(seed)
    made, now, asked = Router(3), 0.0, 0
    calls: dict[int, int] = {}
    ended: set[int] = set()
    lives = [1, 1, 1]

    def follow(effects: list[RouterEffect]) -> None:
        for effect in effects:
            assert effect.request not in ended
            match effect:
                case SendSample():
                    assert effect.request not in calls
                    calls[effect.request] = effect.engine
                case RecallSample():
                    assert calls.pop(effect.request) == effect.engine
                case FailSample():
                    assert effect.request not in calls
                    ended.add(effect.request)

    for _ in range(400):
        now += float(random.exponential(1.0))
        engine, open_calls = int(random.integers(3)), sorted(calls)
        one = open_calls[int(random.integers(len(open_calls)))] if open_calls else -1
        match random.integers(7):
            case 0 | 1:
                follow(made.handle(SampleAsked(asked, f"v{asked % 4}", 1 + asked % 9), now))
                asked += 1
            case 2:
                lives[engine] += int(random.integers(4) == 0)
                follow(made.handle(EngineSeen(engine, lives[engine], bool(random.integers(5))), now))
            case 3:
                follow(made.handle(RouterTick(), now))
            case 4 if one >= 0:
                del calls[one]
                ended.add(one)
                assert made.handle(SampleEnded(one), now) == []
            case 5 if one >= 0:
                del calls[one]
                follow(made.handle(EngineFull(one, "full"), now))
            case 6 if one >= 0:
                del calls[one]
                follow(made.handle(EngineLeft(one, died=bool(random.integers(2))), now))
        loads = [sum(1 + request % 9 for request, number in calls.items() if number == each) for each in range(3)]
        assert [made._engines[each].load for each in range(3)] == loads
        assert made.open == asked - len(ended)
    # Without engines, all that is left ends.
    follow(made.handle(RouterTick(), now + 1000))
    follow(made.handle(RouterTick(), now + 2000))
    assert made.open == 0
