"""Tests the requests of a server to an engine: which versions it holds, how much it accepts, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from proto.messages import (
    Ack,
    CancelSampling,
    ErrorCode,
    LoadVersion,
    Parcel,
    RenderedPrompt,
    RenderPrompt,
    SampledTokens,
    SampleTokens,
    UnloadVersion,
    WeightsRef,
)
from services.rollout.direct import desk as desks
from services.rollout.direct import named
from services.rollout.direct.desk import SampleDesk, check_request
from services.rollout.direct.gate import ScoreGate
from services.rollout.direct.named import NamedVersions
from services.rollout.engine import PromptScores, no_targets
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.weights.source import WeightsSource
from services.rollout.weights.sync import WeightsSync
from shared.parcel import Parcels
from shared.rpc.errors import RpcError
from shared.topology.passes import FASTEST
from tests.unit.rollout.adapter_trainer import START, Published
from tests.unit.rollout.rollout_engine import MODEL

pytestmark = pytest.mark.slow

PROMPT = np.arange(5, 15, dtype=np.int32)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(autouse=True)
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a version that nobody uses give up its place at once (test_named_versions.py)."""
    monkeypatch.setattr(named, "TURN_S", 0.0)
    monkeypatch.setattr(named, "IDLE_S", 0.0)


@pytest.fixture(autouse=True)
def nothing_is_gone(published: Published) -> Iterator[None]:
    yield
    published.gone.clear()


class Desk:
    """A desk over an engine with two places for versions."""

    def __init__(self, published: Published, engine: TransformersEngine, hang_s: float) -> None:
        source = WeightsSource(published, emit=lambda topic, values: None)  # type: ignore[arg-type]
        self.engine = engine
        sync = WeightsSync(engine, "rollout/0", lambda topic, values: None, source)
        self.gate = ScoreGate(needed=engine.scores_alone)
        self.versions = NamedVersions(engine, sync, source, self.gate, 2)
        self.desk = SampleDesk(
            "rollout/0",
            engine=engine,
            versions=self.versions,
            gate=self.gate,
            prompts=PromptBuilder(MODEL, add_generation_prompt=True),
            parcels=Parcels(None, None, store="batch-store/0", incarnation=1),  # type: ignore[arg-type]
            on_text=_at_once,
            emit=lambda topic, values: None,
            hang_s=hang_s,
        )
        self._numbers = iter(range(1000))

    async def load(self, ref: WeightsRef) -> None:
        assert await self.desk.answer(LoadVersion(weights=ref)) == Ack()

    async def sample(self, ref: WeightsRef | None, name: str = "", **chosen: Any) -> SampledTokens:
        request = SampleTokens(
            name=name or str(next(self._numbers)),
            task_id=ref.task_id if ref else "",
            fence=ref.fence if ref else 0,
            prompt=Parcel(
                arrays={"token_ids": chosen.pop("prompt", PROMPT)}
                | ({"targets": chosen.pop("targets")} if "targets" in chosen else {})
            ),
            **{"max_tokens": 8, "seed": 1, "ends": False, **chosen},
        )
        answer = await self.desk.answer(request)
        assert isinstance(answer, SampledTokens)
        return answer


async def _at_once(work: Callable[[], object]) -> object:
    return work()


@asynccontextmanager
async def started(published: Published, hang_s: float = 60.0) -> AsyncIterator[Desk]:
    engine = TransformersEngine(
        model=MODEL, dtype="float32", threads=1, deterministic=False, passes=FASTEST, adapter=START, live=2
    )
    await engine.start()
    try:
        yield Desk(published, engine, hang_s)
    finally:
        await engine.stop()


async def refused(work: Any) -> RpcError:
    with pytest.raises(RpcError) as raised:
        await work
    return raised.value


def run(scenario: Any) -> None:
    asyncio.run(scenario)


def test_versions_are_loaded_proved_and_named_and_the_base_is_there_with_the_first(published: Published) -> None:
    async def scenario() -> None:
        async with started(published) as made:
            error = await refused(made.sample(None))
            assert error.code == ErrorCode.MISSING
            assert (await refused(made.sample(published.refs[1]))).code == ErrorCode.MISSING
            await made.load(published.refs[1])
            for ref, step in ((published.refs[1], 2), (None, -1)):
                answer = await made.sample(ref, samples=3, prompt_logprobs=True, texts=True)
                arrays = answer.parcel.arrays
                assert arrays["lengths"].tolist() == [8] * 3
                assert set(arrays["versions"].tolist()) == {step}
                assert len(arrays["token_ids"]) == len(arrays["logprobs"]) == 24
                assert len(arrays["prompt_logprobs"]) == len(PROMPT) - 1
                assert answer.reasons == ["length"] * 3
                assert len(answer.texts) == 3
            assert made.engine.swaps == 2  # the drill, and the version

    run(scenario())


def test_the_version_that_was_used_least_recently_leaves_but_never_one_that_a_request_names(
    published: Published,
) -> None:
    async def scenario() -> None:
        first, second, third, fourth = published.refs
        async with started(published) as made:
            await made.load(first)
            await made.load(second)
            await made.sample(second)
            await made.sample(first)
            await made.load(third)  # in place of the second
            assert (await refused(made.sample(second))).code == ErrorCode.MISSING
            running = [asyncio.create_task(made.sample(ref, max_tokens=400, samples=4)) for ref in (first, third)]
            await asyncio.sleep(0)
            error = await refused(made.load(fourth))
            assert error.code == ErrorCode.BUSY
            assert error.retry_after_s > 0
            await made.desk.answer(UnloadVersion(task_id=third.task_id, fence=third.fence))
            for answer in await asyncio.gather(*running):
                assert answer.parcel.arrays["lengths"].tolist() == [400] * 4
            assert (await refused(made.sample(third))).code == ErrorCode.MISSING
            await made.load(fourth)
            await made.sample(first)
            await made.sample(fourth)

    run(scenario())


def test_callers_that_ask_for_a_version_at_once_share_its_load(published: Published) -> None:
    async def scenario() -> None:
        async with started(published) as made:
            await asyncio.gather(*(made.load(published.refs[1]) for _ in range(4)))
            assert made.engine.swaps == 2  # the drill, and the version

    run(scenario())


def test_a_version_whose_weights_are_gone_has_an_error_of_its_own_and_costs_no_place(published: Published) -> None:
    async def scenario() -> None:
        first, second, third, _ = published.refs
        async with started(published) as made:
            for ref in (first, second):
                await made.load(ref)
                await made.sample(ref)
            published.gone.add(third.task_id)
            error = await refused(made.load(third))
            assert error.code == ErrorCode.GONE
            assert error.names == [third.task_id]
            await made.sample(first)
            await made.sample(second)

    run(scenario())


def test_a_version_that_the_engine_does_not_compute_ends_the_service(published: Published) -> None:
    async def scenario() -> None:
        async with started(published) as made:
            running = asyncio.create_task(made.desk.run())
            canary = msgspec.structs.replace(published.refs[1].canary, logprobs=published.refs[0].canary.logprobs)
            error = await refused(made.load(msgspec.structs.replace(published.refs[1], canary=canary)))
            assert error.code == ErrorCode.CONFLICT
            with pytest.raises(RpcError, match="canary mismatch"):
                await running

    run(scenario())


def test_samples_beyond_the_bound_are_refused_and_accepted_when_others_have_ended(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "OPEN_SAMPLES", 6)

    async def scenario() -> None:
        ref = published.refs[1]
        async with started(published) as made:
            await made.load(ref)
            running = [asyncio.create_task(made.sample(ref, samples=3, max_tokens=100)) for _ in range(2)]
            await asyncio.sleep(0)
            error = await refused(made.sample(ref))
            assert error.code == ErrorCode.BUSY
            assert "6 samples are open" in str(error)
            assert error.retry_after_s > 0
            await asyncio.gather(*running)
            assert made.desk.samples == 0
            await made.sample(ref, samples=9)  # alone, a request may exceed the bound

    run(scenario())


@pytest.mark.parametrize("how", ["cancelled by name", "caller gone"])
def test_a_request_that_is_no_longer_wanted_frees_its_rows(published: Published, how: str) -> None:
    async def scenario() -> None:
        ref = published.refs[1]
        async with started(published) as made:
            await made.load(ref)
            gone = asyncio.create_task(made.sample(ref, "a", samples=8, max_tokens=480))
            beside = asyncio.create_task(made.sample(ref, "b", max_tokens=200))
            await asyncio.sleep(0.05)
            assert not gone.done()
            if how == "cancelled by name":
                await made.desk.answer(CancelSampling(name="a"))
                assert (await refused(gone)).code == ErrorCode.LOST
            else:
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
            await beside
            await made.engine.compute(lambda: None)  # after the last step
            assert made.engine.stats()["generated_tokens"] == 200
            assert made.desk.samples == 0
            await made.desk.answer(CancelSampling(name="a"))  # no longer open

    run(scenario())


def test_an_engine_that_fails_ends_the_service_and_its_requests_may_go_elsewhere(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with started(published) as made:
            await made.load(published.refs[1])
            running = asyncio.create_task(made.desk.run())

            def broken() -> None:
                raise ValueError("the device is on fire")

            monkeypatch.setattr(made.engine._versions, "step", broken)
            error = await refused(made.sample(published.refs[1]))
            assert error.code == ErrorCode.LOST
            with pytest.raises(ValueError, match="on fire"):
                await running

    run(scenario())


def test_an_engine_that_hangs_while_it_samples_ends_the_service(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "REPORT_S", 0.02)

    async def scenario() -> None:
        async with started(published, hang_s=0.5) as made:
            await made.load(published.refs[1])
            running = asyncio.create_task(made.desk.run())
            await asyncio.sleep(0.7)  # nothing is sampled, so it has not hung
            assert not running.done()
            released = threading.Event()
            monkeypatch.setattr(made.engine._versions, "step", released.wait)
            sampling = asyncio.create_task(made.sample(published.refs[1]))
            with pytest.raises(RpcError, match=r"no progress for 0\.5 s"):
                await asyncio.wait_for(running, 20)
            monkeypatch.undo()
            released.set()
            await sampling

    run(scenario())


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"samples": 0}, "samples: 0 must be from 1 to 1024"),
        ({"samples": 1025}, "samples: 1025"),
        ({"temperature": -0.5}, "temperature: -0.5"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0.0}, "top_p: 0.0 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p: nan"),
        ({"top_k": -1}, "top_k: -1"),
        ({"seed": -1}, "seed: -1"),
        ({"max_tokens": -1}, "max_tokens: -1"),
        ({"top_prompt_logprobs": 21}, "top_prompt_logprobs: 21"),
        ({"top_logprobs": 21}, "top_logprobs: 21"),
        ({"stop": ["x"] * 17}, "stop: at most 16"),
        ({"stop": [""]}, "stop: at most 16 texts of 1 to 256 bytes"),
        ({"stop_ids": [-1]}, "stop_ids: at most 64 tokens"),
        ({"prompt": np.zeros(0, np.int32)}, "prompt: must be int32"),
        ({"prompt": np.zeros((2, 2), np.int32)}, "prompt: must be int32"),
        ({"prompt": np.array([1, 64], np.int32)}, "prompt: token 64 is not in the vocabulary of 64"),
        ({"prompt": np.array([-2, 1], np.int32)}, "prompt: token -2"),
        ({"max_tokens": 503}, "prompt of 10 tokens and max_tokens 503: the model's context has 512"),
    ],
)
def test_values_that_are_out_of_range_are_refused_by_name(
    published: Published, chosen: dict[str, Any], text: str, desk: Callable[[Any], Any]
) -> None:
    async def scenario(made: Desk) -> None:
        error = await refused(made.sample(published.refs[1], **chosen))
        assert error.code == ErrorCode.BAD_REQUEST
        assert text in str(error)

    desk(scenario)


@pytest.fixture(scope="module")
def desk(published: Published) -> Iterator[Callable[[Any], Any]]:
    """Runs scenarios with one desk that holds the second version."""
    runner = asyncio.Runner()
    stack = contextlib.AsyncExitStack()

    async def start() -> Desk:
        made = await stack.enter_async_context(started(published))
        await made.load(published.refs[1])
        return made

    made = runner.run(start())
    yield lambda scenario: runner.run(scenario(made))
    runner.run(stack.aclose())
    runner.close()


def test_no_limit_means_up_to_the_end_of_the_context(published: Published, desk: Callable[[Any], Any]) -> None:
    async def scenario(made: Desk) -> None:
        answer = await made.sample(published.refs[1], max_tokens=0)
        assert answer.parcel.arrays["lengths"].tolist() == [512 - len(PROMPT)]

    desk(scenario)


def test_a_prompt_of_one_token_has_no_scores(published: Published, desk: Callable[[Any], Any]) -> None:
    async def scenario(made: Desk) -> None:
        chosen = {"prompt_logprobs": True, "top_prompt_logprobs": 2, "top_logprobs": 3}
        arrays = (await made.sample(None, prompt=PROMPT[:1], **chosen)).parcel.arrays
        assert arrays["prompt_logprobs"].shape == (0,)
        assert arrays["top_ids"].shape == arrays["top_logprobs"].shape == (0, 2)
        assert arrays["sample_top_ids"].shape == arrays["sample_top_logprobs"].shape == (8, 3)

    desk(scenario)


def test_the_likeliest_tokens_beside_sampled_ones_and_the_log_probs_of_any_tokens_of_a_prompt(
    published: Published, desk: Callable[[Any], Any]
) -> None:
    targets = np.full((len(PROMPT) - 1, 2), -1, np.int32)
    targets[:, 0] = PROMPT[1:]
    targets[4] = 9, 30

    async def scenario(made: Desk) -> None:
        ref = published.refs[1]
        arrays = (await made.sample(ref, samples=2, top_logprobs=4, targets=targets)).parcel.arrays
        assert "prompt_logprobs" not in arrays
        swaps = made.engine.swaps
        for one in range(2):
            own = slice(8 * one, 8 * one + 8)
            whole = np.concatenate([PROMPT, arrays["token_ids"][own]])
            scores = await made.engine.score_prompt(whole, swaps, 4, no_targets(whole))
            assert (arrays["sample_top_ids"][own] == scores.top_ids[len(PROMPT) - 1 :]).all()
            assert (arrays["sample_top_logprobs"][own] == scores.top_logprobs[len(PROMPT) - 1 :]).all()
            sampled = scores.logprobs[len(PROMPT) - 1 :]
            assert np.abs(sampled - arrays["logprobs"][own]).max() <= 1e-5
        logprobs = (await made.engine.score_prompt(PROMPT, swaps, 0, no_targets(PROMPT))).logprobs
        given = arrays["target_logprobs"]
        others = np.arange(len(PROMPT) - 1) != 4
        assert np.abs(given[others, 0] - logprobs[others]).max() <= 1e-5
        assert (given[others, 1] == 0).all()
        assert (given[4] < 0).all()
        for bad, text in (
            (targets[1:], "targets: must be int32 [9, K]"),
            (targets.astype(np.int64), "targets: must be int32"),
            (targets + 60, "below 64"),
            (targets - 1, "from -1"),
        ):
            error = await refused(made.sample(ref, targets=bad))
            assert error.code == ErrorCode.BAD_REQUEST
            assert text in str(error)

    desk(scenario)


def test_a_request_that_is_abandoned_while_its_samples_are_scored_is_not_scored_to_its_end(
    published: Published, desk: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(made: Desk) -> None:
        score, scored = made.engine.score_prompt, 0

        async def and_leave(*given: Any) -> PromptScores:
            nonlocal scored
            scored += 1
            await made.desk.answer(CancelSampling(name="left"))
            return await score(*given)

        monkeypatch.setattr(made.engine, "score_prompt", and_leave)
        error = await refused(made.sample(published.refs[1], "left", samples=50, top_logprobs=1))
        assert error.code == ErrorCode.LOST
        assert scored == 1

    desk(scenario)


def test_a_result_for_which_the_store_has_no_room_is_an_error_that_is_not_tried_again(
    published: Published, desk: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(parcels: Parcels, arrays: object) -> Parcel:
        raise RpcError(ErrorCode.BUSY, "no room")

    async def scenario(made: Desk) -> None:
        monkeypatch.setattr(Parcels, "pack", full)
        error = await refused(made.sample(published.refs[1]))
        assert error.code == ErrorCode.INTERNAL
        assert "the store has no room for a result of 0 MiB; ask for less at a time" in str(error)

    desk(scenario)


def test_a_sample_whose_places_are_scored_leaves_room_for_one_more_token(
    published: Published, desk: Callable[[Any], Any]
) -> None:
    async def scenario(made: Desk) -> None:
        arrays = (await made.sample(published.refs[1], max_tokens=0, top_logprobs=1)).parcel.arrays
        assert arrays["lengths"].tolist() == [511 - len(PROMPT)]
        assert len(arrays["sample_top_ids"]) == 511 - len(PROMPT)

    desk(scenario)


def test_text_and_messages_become_the_tokens_of_the_policys_tokenizer(desk: Callable[[Any], Any]) -> None:
    prompts = PromptBuilder(MODEL, add_generation_prompt=True)

    async def scenario(made: Desk) -> None:
        for row in ({"prompt": "1+2="}, {"prompt": [{"role": "user", "content": "1+2="}]}):
            answer = await made.desk.answer(RenderPrompt(row=msgspec.json.encode(row)))
            assert isinstance(answer, RenderedPrompt)
            assert answer.prompt.arrays["token_ids"].tolist() == prompts.token_ids(row)
        for bad in (b"{", b"[]", b"{}", msgspec.json.encode({"prompt": [{"role": "user", "content": "1" * 9000}]})):
            error = await refused(made.desk.answer(RenderPrompt(row=bad)))
            assert error.code == ErrorCode.BAD_REQUEST

    desk(scenario)


def test_what_must_run_alone_waits_for_samples_and_later_samples_wait_for_it() -> None:
    async def scenario() -> None:
        gate, order = ScoreGate(needed=True), []
        done = asyncio.Event()

        async def sample(name: str, until: asyncio.Event | None = None) -> None:
            async with gate.beside():
                order.append(f"{name} begins")
                if until is not None:
                    await until.wait()
                order.append(f"{name} ends")

        async def alone(name: str) -> None:
            async with gate.alone():
                order.append(f"{name} begins")
                await asyncio.sleep(0)
                order.append(f"{name} ends")

        first = asyncio.create_task(sample("first", done))
        await asyncio.sleep(0)
        work = [asyncio.create_task(each) for each in (alone("score"), alone("load"), sample("later"))]
        await asyncio.sleep(0.01)
        assert order == ["first begins"]
        done.set()
        await asyncio.gather(first, *work)
        assert order == [
            *("first begins", "first ends", "score begins", "score ends", "load begins", "load ends"),
            *("later begins", "later ends"),
        ]

    run(scenario())


def test_every_field_of_a_valid_request_passes() -> None:
    check_request(
        SampleTokens(
            name="a",
            prompt=Parcel(),
            samples=1024,
            temperature=0.0,
            top_k=5,
            top_p=1.0,
            stop=["x"] * 16,
            stop_ids=[0] * 64,
            seed=(1 << 63) - 1,
            top_prompt_logprobs=20,
        )
    )
