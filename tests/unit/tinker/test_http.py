from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from services.policy_trainer.tinker import application, protobuf
from services.policy_trainer.tinker.events import ClockTick, Deleted
from tests.integration.tinker.client import datum, logprobs
from tests.unit.tinker.served import CONTEXT, KEYS, MODEL, Served, served

Work = Callable[[Served], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(application, "WAIT_S", 0.05)

    def run(work: Work, **keys: object) -> None:
        async def running() -> None:
            async with served(tmp_path / "server", monkeypatch, **keys) as one:
                await work(one)

        asyncio.run(running())

    return run


def gradient(model: str, seq: int, *data: bytes, loss: str = "cross_entropy", **numbers: float) -> bytes:
    message = protobuf.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = model, seq, loss
    for one in data:
        message.data.add().ParseFromString(one)
    for name, value in numbers.items():
        message.loss_fn_config[name] = value
    return bytes(message.SerializeToString())


def test_nothing_but_the_sign_of_life_is_answered_without_a_key(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        assert (await one.client.get("/api/v1/healthz")).json() == {"status": "ok"}
        for path in ("/api/v1/get_server_capabilities", "/v1/models", "/api/v1/create_session", "/"):
            assert (await one.client.get(path)).status_code == 401
            assert (await one.client.get(path, headers={"x-api-key": "tml-0"})).status_code == 401
        bearer = {"authorization": f"Bearer {KEYS['one']}"}
        assert (await one.client.get("/api/v1/get_server_capabilities", headers=bearer)).status_code == 200

    run(work)


def test_other_host_names_and_pages_of_other_sites_are_refused(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        headers = {"x-api-key": KEYS["one"]}
        assert (await one.client.get("/api/v1/healthz", headers={"host": "evil.example"})).status_code == 421
        origin = {**headers, "origin": "http://evil.example"}
        assert (await one.client.get("/api/v1/get_server_capabilities", headers=origin)).status_code == 403

    run(work)


def test_the_things_of_another_key_are_not_there(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session, model = await one.model()
        saved = await one.result(await one.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
        other = KEYS["two"]
        future = {"request_id": f"{model}/1"}
        await one.post("get_info", {"model_id": model}, status=404, key=other)
        await one.post("retrieve_future", future, status=404, key=other)
        await one.post("forward_backward", gradient(model, 2, datum([1, 2])), status=404, key=other)
        await one.post("weights_info", {"tinker_path": saved["path"]}, status=404, key=other)
        await one.post("session_heartbeat", {"session_id": session}, status=404, key=other)
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        await one.post("create_sampling_session", sampling, status=404, key=other)
        assert (await one.post("retrieve_future", future))["path"] == saved["path"]

    run(work)


def test_log_probs_come_back_in_the_order_of_the_data_and_with_the_shape_of_the_targets(
    run: Callable[..., None],
) -> None:
    async def work(one: Served) -> None:
        _, model = await one.model()
        several = np.array([[5, 6], [7, 8]])
        data = [datum([1, 2, 3]), datum([4, 5]), datum([1, 2, 3], target_tokens=several, weights=np.ones((2, 2)))]
        output = await one.result(await one.post("forward_backward", gradient(model, 1, *data)))
        arrays = logprobs(output)
        assert [array.tolist() for array in arrays] == [[-2, -3], [-5], [[-5, -6], [-7, -8]]]
        assert protobuf.parse("ForwardBackwardOutput", output).metrics["loss:sum"] == 10.0

    run(work)


def test_sparse_targets_and_bfloat16_weights_are_read(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        _, model = await one.model()
        message = protobuf.new("Datum")
        message.ParseFromString(datum([1, 2, 3]))
        targets, weights = message.loss_fn_inputs["target_tokens"], message.loss_fn_inputs["weights"]
        targets.Clear()
        targets.dtype, targets.shape[:] = 2, [2, 3]
        targets.sparse_csr.values = np.array([7, 9], "<i8").tobytes()
        targets.sparse_csr.crow_indices = np.array([0, 1, 2], "<i8").tobytes()
        targets.sparse_csr.col_indices = np.array([2, 0], "<i8").tobytes()
        weights.dtype, weights.shape[:] = 4, [2, 3]
        weights.dense = (np.array([0, 0, 0.5, 1, 0, 0], np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        await one.result(await one.post("forward_backward", gradient(model, 1, message.SerializeToString())))
        (shards,) = one.stand.shards.values()
        assert shards["target_tokens"].tolist() == [0, 0, 7, 9, 0, 0]
        assert shards["token_weights"].tolist() == [0, 0, 0.5, 1, 0, 0]

    run(work)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda model: gradient(model, 1, datum([1, 999])), "token 999 is not in the vocabulary of 512"),
        (lambda model: gradient(model, 1, datum([1, 2]), loss="gspo"), "gspo"),
        (lambda model: gradient(model, 1, datum([1, 2]), loss="stable_reinforce"), "importance_sampling"),
        (lambda model: gradient(model, 1, datum([1, 2]), loss="ppo"), "advantages"),
        (lambda model: gradient(model, 1, datum([1, 2]), clip=1.0), "cross_entropy has no option 'clip'"),
        (lambda model: gradient(model, 1, datum([1, 2], weights=[np.nan])), "finite"),
        (lambda model: gradient(model, 1, datum([1, 2], mask=[1.0])), "does not read it"),
        (lambda model: gradient(model, 1, datum([1, 2], target_tokens=[3, 4])), "must be [1]"),
        (lambda model: gradient(model, 1, datum(list(range(CONTEXT % 512)) * 20)), f"from 1 to {CONTEXT}"),
        (lambda model: gradient(model, 1), "0 datums"),
    ],
)
def test_contents_that_cannot_be_used_fail_their_future_and_the_next_step(
    body: Callable[[str], bytes], says: str, run: Callable[..., None]
) -> None:
    async def work(one: Served) -> None:
        _, model = await one.model()
        failed = await one.result(await one.post("forward_backward", body(model)))
        assert says in failed["error"]
        assert failed["category"] == "user"
        step = await one.result(await one.post("optim_step", {"model_id": model, "seq_id": 2}))
        assert "no step was taken" in step["error"]
        await one.result(await one.post("forward_backward", gradient(model, 3, datum([1, 2]))))
        good = await one.result(await one.post("optim_step", {"model_id": model, "seq_id": 4}))
        assert good["metrics"]["grad_norm"] == 0.5

    run(work)


def test_a_body_beyond_the_limit_is_refused(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        await one.post("create_session", b" " * 70_000, status=413)

    run(work, body_limit=65_536)


def test_bytes_that_are_no_message_are_refused(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        await one.post("forward_backward", b"\xff\xff\xff", status=400)
        await one.post("forward_backward", b"", status=400)
        await one.post("optim_step", b"[1]", status=400)
        await one.post("create_session", b'{"tags": [], "surprise": 1}', status=400)
        await one.post("asample", b"{" * 10_000, status=400)

    run(work)


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rank": 0}, "trains all weights"),
        ({"rank": 33}, "from 1 to 32"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "nothing is trained"),
        ({"seed": -2}, "lora_config.seed"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(
    lora: dict[str, object], says: str, run: Callable[..., None]
) -> None:
    async def work(one: Served) -> None:
        session = (await one.post("create_session", {"tags": []}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4, **lora}}
        failed = await one.result(await one.post("create_model", body))
        assert says in failed["error"]
        assert failed["category"] == "user"

    run(work)


def test_a_server_that_trains_all_weights_refuses_adapters(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session = (await one.post("create_session", {"tags": []}))["session_id"]
        for number, lora in enumerate(({"lora_config": {"rank": 0}}, {})):
            body = {"session_id": session, "model_seq_id": number, "base_model": MODEL, **lora}
            model = (await one.result(await one.post("create_model", body)))["model_id"]
            info = await one.post("get_info", {"model_id": model})
            assert (info["is_lora"], info["lora_rank"]) == (False, 0)
        body = {"session_id": session, "model_seq_id": 2, "base_model": MODEL, "lora_config": {"rank": 4}}
        failed = await one.result(await one.post("create_model", body))
        assert "this server trains all weights; ask for rank 0" in failed["error"]
        assert failed["category"] == "user"

    run(work, full_training=True)


def test_a_model_of_another_name_is_refused(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session = (await one.post("create_session", {"tags": []}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "other", "lora_config": {"rank": 4}}
        assert MODEL in (await one.result(await one.post("create_model", body)))["error"]
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "other"}
        await one.post("create_sampling_session", sampling, status=404)

    run(work)


def test_a_future_that_is_not_done_is_polled_again(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        _, model = await one.model()
        await one.post("optim_step", {"model_id": model, "seq_id": 2})
        pending = await one.post("retrieve_future", {"request_id": f"{model}/2"}, status=408)
        assert pending["type"] == "try_again"

    run(work)


def test_a_server_that_was_killed_knows_its_futures_and_samples_again_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before() -> tuple[str, str, int]:
        async with served(tmp_path / "server", monkeypatch) as one:
            session, model = await one.model()
            await one.post("forward_backward", gradient(model, 1, datum([1, 2])))
            await one.result(await one.post("optim_step", {"model_id": model, "seq_id": 2}))
            one.engines.slow = asyncio.Event()
            sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
            sampler = (await one.post("create_sampling_session", sampling))["sampling_session_id"]
            await one.post("asample", sample(sampler))
            await one.post("asample", sample(sampler, 1))
            await asyncio.sleep(0)  # the samples begin
            (seed, other) = [request.seed for request in one.engines.samples]
            assert seed != other
            one.server._journal.write = lambda *_: None  # type: ignore[method-assign]  # killed: nothing more is written
            return model, sampler, seed

    async def after(model: str, sampler: str, seed: int) -> None:
        async with served(tmp_path / "server", monkeypatch) as one:
            done = await one.result({"request_id": f"{model}/2"})
            assert done["metrics"]["grad_norm"] == 0.5
            assert not one.engines.samples
            target = {"target": {"sampling_session_id": sampler}, "prev_cursor": 5, "timeout": 5}
            polled = await one.post("retrieve_futures", target | {"retrieved_request_ids": [f"{sampler}/1"]})
            assert [(each["state"], each["request_id"]) for each in polled["completions"]] == [
                ("finished", f"{sampler}/0")
            ]
            assert [(each.seed, each.token_ids.tolist()) for each in one.engines.samples] == [(seed, [1, 2, 3])]
            again = await one.post("asample", sample(sampler))
            assert protobuf.parse("SampleResponse", await one.result(again)).sequences[0].stop_reason == 1
            assert len(one.engines.samples) == 1
            await one.post("retrieve_future", {"request_id": f"{sampler}/1"}, status=410)

    asyncio.run(after(*asyncio.run(before())))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"num_samples": 0}, "num_samples: 0 is out of range"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: is not computed here"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "use the last N of the result"),
        ({"record_stability_info": True}, "loss_fn=importance_sampling"),
        ({"num_samples": 1024, "topk_sample_logprobs": 20, "sampling_params": {"max_tokens": 4096}}, "83886080 tokens"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "it must be [2] or [2, K]"),
    ],
)
def test_a_sample_that_cannot_be_computed_is_refused_by_name(
    asked: dict[str, object], says: str, run: Callable[..., None]
) -> None:
    async def work(one: Served) -> None:
        session, _ = await one.model()
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await one.post("create_sampling_session", sampling))["sampling_session_id"]
        refused = await one.post("asample", sample(sampler) | asked, status=400)
        assert says in json.dumps(refused)
        assert not one.engines.samples

    run(work)


def test_tokens_to_score_reach_the_engines(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session, _ = await one.model()
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await one.post("create_sampling_session", sampling))["sampling_session_id"]
        tensor = {"data": [4, -1, -1, 5], "dtype": "int64", "shape": [2, 2]}
        asked = {"target_prompt_logprobs": tensor, "topk_sample_logprobs": 3}
        await one.result(await one.post("asample", sample(sampler) | asked))
        (request,) = one.engines.samples
        assert request.targets is not None
        assert request.targets.tolist() == [[4, -1], [-1, 5]]
        assert request.top_logprobs == 3

    run(work)


def test_weights_saved_for_sampling_outlive_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def before() -> tuple[str, str]:
        async with served(tmp_path / "server", monkeypatch) as one:
            session, model = await one.model()
            asked = {"model_id": model, "seq_id": 1, "path": "good"}
            saved = await one.result(await one.post("save_weights_for_sampler", asked))
            sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
            sampler = (await one.post("create_sampling_session", sampling))["sampling_session_id"]
            one.engines.slow = asyncio.Event()
            await one.post("asample", sample(sampler))
            return sampler, saved["path"]

    async def again(shm: str, sampler: str, path: str) -> tuple[set[str], list[str]]:
        async with served(tmp_path / "server", monkeypatch, shm=shm) as one:
            own = one.server.state.own
            while not own.published:
                await asyncio.sleep(0)
            one.engines.gone = own.samplers[sampler].version not in own.versions
            target = {"target": {"sampling_session_id": sampler}, "timeout": 5}
            first = (await one.post("retrieve_futures", target))["completions"]
            if one.engines.gone:  # as the SDK does
                await one.post("retrieve_future", {"request_id": f"{sampler}/0"}, status=410)
            one.engines.gone = False
            await one.result(await one.post("asample", sample(sampler, 1)))
            assert one.engines.samples[-1].version == own.versions[own.checkpoints[path].version].ref
            seeds.add(one.engines.samples[-1].seed)
            return {each["state"] for each in first}, [folder.name for folder in one.stand.loaded]

    seeds: set[int] = set()
    sampler, path = asyncio.run(before())
    # Samples wait in the journal. Their client must ask for them again if their version is gone.
    assert asyncio.run(again("/dev/shm/one", sampler, path)) == ({"finished"}, [])
    for shm in ("/dev/shm/two", "/dev/shm/three"):
        assert asyncio.run(again(shm, sampler, path)) == ({"failed"}, ["good"])
    assert len(seeds) == 1

    async def deleted() -> None:
        async with served(tmp_path / "server", monkeypatch, shm="/dev/shm/four") as one:
            one.stand.on_load = lambda: one.server.handle(Deleted(path))
            own = one.server.state.own
            while not own.published:
                await asyncio.sleep(0)
            assert path not in own.checkpoints
            one.server.handle(ClockTick())
            assert [version.id for version in own.versions.values()] == ["1/0"]

    asyncio.run(deleted())


def sample(sampler: str, seq: int = 0, **params: object) -> dict[str, object]:
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}, {"tokens": [3]}]}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 3, **params},
    }


def test_samples_without_a_seed_get_the_same_one_when_they_are_asked_for_again(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session, _ = await one.model()
        sampling = {"session_id": session, "sampling_session_seq_id": 3, "base_model": MODEL}
        sampler = (await one.post("create_sampling_session", sampling))["sampling_session_id"]
        for seq in (0, 1, 0):
            future = await one.post("asample", sample(sampler, seq))
            await one.result(future)
            await one.post(
                "retrieve_futures",
                {
                    "target": {"sampling_session_id": sampler},
                    "timeout": 0,
                    "retrieved_request_ids": [future["request_id"]],
                },
            )
        seeds = [request.seed for request in one.engines.samples]
        assert seeds[0] == seeds[2] != seeds[1]
        assert one.engines.samples[0].token_ids.tolist() == [1, 2, 3]

    run(work)


@pytest.mark.parametrize(
    ("stop", "means"),
    [
        (None, ((), (), True)),
        ([], ((), (), False)),
        ("a", (("a",), (), False)),
        (["a", "b"], (("a", "b"), (), False)),
        ([7], ((), (7,), False)),
    ],
)
def test_stops_mean_what_the_sdk_says(stop: object, means: tuple[object, ...], run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session, _ = await one.model()
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await one.post("create_sampling_session", sampling))["sampling_session_id"]
        await one.result(await one.post("asample", sample(sampler, stop=stop)))
        (asked,) = one.engines.samples
        assert (asked.stop, asked.stop_ids, asked.ends) == means

    run(work)


def test_a_name_that_follows_the_newest_weights_never_means_the_base(
    run: Callable[..., None],
) -> None:
    async def work(one: Served) -> None:
        session, model = await one.model()
        await one.post("forward_backward", gradient(model, 1, datum([1, 2])))
        await one.post("optim_step", {"model_id": model, "seq_id": 2})
        asked = {"model_id": model, "seq_id": 3, "kind": "inflight", "sampling_session_seq_id": 0}
        saved = await one.result(await one.post("save_weights_for_sampler", asked))
        sampler = saved["sampling_session_id"]
        await one.result(await one.post("asample", sample(sampler)))
        (sampled,) = one.engines.samples
        assert sampled.version is not None
        assert sampled.version.step == 1
        await one.post(f"sessions/{session}/finish", {})
        one.server.handle(ClockTick())
        refused = await one.post("asample", sample(sampler, 1), status=400)
        assert "its weights were deleted, or cannot be published again; save them again" in refused["detail"]

    run(work)


def test_a_cancelled_sample_leaves_its_engine(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session, _ = await one.model()
        one.engines.slow = asyncio.Event()
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await one.post("create_sampling_session", sampling))["sampling_session_id"]
        future = await one.post("asample", sample(sampler))
        await one.post("cancel_future", {"request_id": future["request_id"]})
        assert (await one.result(future))["error"] == "cancelled"

    run(work)


def test_a_checkpoint_is_listed_described_loaded_and_deleted(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        session, model = await one.model(train_unembed=False)
        path = (await one.result(await one.post("save_weights", {"model_id": model, "path": "a", "seq_id": 1})))["path"]
        info = await one.post("weights_info", {"tinker_path": path})
        assert (info["lora_rank"], info["train_unembed"], info["base_model"]) == (4, False, MODEL)
        again = await one.result(await one.post("save_weights", {"model_id": model, "path": "a", "seq_id": 2}))
        assert "overwrite" in again["error"]
        loads = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        loaded = await one.result(await one.post("load_weights", loads))
        assert loaded == {"type": "load_weights", "path": path, "model_id": f"{session}:train:1"}
        headers = {"x-api-key": KEYS["one"]}
        runs = (await one.client.get("/api/v1/training_runs", headers=headers)).json()
        assert [run["training_run_id"] for run in runs["training_runs"]] == [model, loaded["model_id"]]
        url = f"/api/v1/training_runs/{model}/checkpoints"
        (listed,) = (await one.client.get(url, headers=headers)).json()["checkpoints"]
        assert (listed["checkpoint_id"], listed["tinker_path"]) == ("weights/a", path)
        assert (await one.client.get(f"{url}/weights/a/archive", headers=headers)).content[257:262] == b"ustar"
        assert (await one.client.delete(f"{url}/weights/a", headers=headers)).status_code == 204
        await one.post("weights_info", {"tinker_path": path}, status=404)
        assert not (one.folder / "models" / "2" / "weights" / "a").exists()

    run(work)


def test_what_the_server_does_not_have_is_named(run: Callable[..., None]) -> None:
    async def work(one: Served) -> None:
        refused = await one.post("auth/token", {}, status=404)
        assert "auth/token" in refused["detail"]

    run(work)
