"""The frozen model's log-probs equal those of a plain forward pass over each sequence at the sampling temperature."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from proto.messages import Canary
from proto.tensors import Array
from services.reference import frozen
from services.reference.frozen import FrozenTorch
from services.reference.scorer import BEGINNING, FrozenScorer
from services.reference.scoring import Scoring
from services.rollout.engine import Generation
from services.rollout.results.finish import task_shards
from services.rollout.sampling.trajectory import BlockVersions, answers_of, single_turns
from shared.colocation.turns import OwnDevices
from shared.lease import Lease, LeaseLost
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.model.picks import Likeliest
from shared.rpc.errors import BadInput
from shared.topology.passes import FASTEST
from tests.reward_folder import reward_folder
from tests.unit.rollout.rollout_engine import MODEL
from tests.unit.shared.test_lease import book_of, gets_on, grant
from tests.weights_refs import weights_ref


def test_the_torch_reference_sets_up_its_device_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def own_device(kind: str, rank: int) -> str:
        asked.append((kind, rank))
        return "cpu"  # this machine may have no GPU

    monkeypatch.setattr(frozen, "own_device", own_device)
    made = FrozenTorch(MODEL, "float32", 64, "cuda", FASTEST)
    made.load()
    assert asked == [("cuda", 0)]
    assert {each.device.type for each in made.tensors()} == {"cpu"}


def test_the_log_probs_of_all_micro_batches_are_copied_to_the_host_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []
    to_numpy = frozen.to_numpy
    monkeypatch.setattr(frozen, "to_numpy", lambda values: copied.append(values) or to_numpy(values))
    made, parts = FrozenTorch(MODEL, "float32", 64, passes=FASTEST), list[None]()
    made.load()
    ids, lengths, mask = np.arange(3, 163, dtype=np.int32) % 60, np.full(4, 40, np.int32), np.ones(160, np.uint8)
    mask[::40] = 0  # the first token of a sequence has no prediction
    found = made.logprobs(ids, lengths, mask, 1.0, lambda: parts.append(None))
    assert len(parts) > 1
    assert [values.shape for values in copied] == [(160,)]
    assert np.count_nonzero(found) == 4 * 39


def tasks() -> list[dict[str, Array]]:
    """Return three ragged tasks of three samples each."""
    random = np.random.default_rng(0)
    made = []
    for prompt_tokens in (3, 9, 6):
        prompt = random.integers(3, 60, prompt_tokens).tolist()
        group = [
            Generation(
                random.integers(3, 60, n).astype(np.int32), np.zeros(n, np.float32), "stop", np.zeros(n, np.int32)
            )
            for n in (1, 7, 4)
        ]
        (answers,) = answers_of([group], BlockVersions(0, swaps=0))
        made.append(task_shards(single_turns(prompt, answers)))
    return made


def scorer_of(
    folder: Path, max_tokens: int, temperature: float = 1.0, likeliest: Likeliest | None = None
) -> FrozenScorer:
    return FrozenScorer(
        lambda: FrozenTorch(MODEL, "float32", max_tokens, passes=FASTEST),
        source=MODEL,
        threads=1,
        temperature=temperature,
        scratch=folder / "reference-0.bin",
        likeliest=likeliest,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reference_values_equal_those_of_each_sequence_scored_alone(temperature: float, tmp_path: Path) -> None:
    scorer = scorer_of(tmp_path, 4096, temperature)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    shards = tasks()

    async def run() -> list[Array]:
        await scorer.start()
        return [values for (values,) in await scorer.score(shards, threading.Event())]

    scored = asyncio.run(run())
    scorer.stop()
    assert scorer.progress >= 2
    for task, values in zip(shards, scored, strict=True):
        assert values.dtype == np.float32
        assert values.shape == task["token_ids"].shape
        wanted = np.zeros(len(values), np.float32)
        at = 0
        for length in task["lengths"].tolist():
            ids = torch.from_numpy(task["token_ids"][at : at + length].astype(np.int64))
            with torch.inference_mode():
                logprobs = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
            wanted[at + 1 : at + length] = logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
            at += length
        wanted *= task["loss_mask"]
        assert np.abs(values - wanted).max() < 1e-4


@pytest.mark.parametrize("max_tokens", [16, 4096])
def test_the_likeliest_tokens_are_those_of_each_sequence_scored_alone(max_tokens: int, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    shards = tasks()

    async def run() -> list[tuple[Array, ...]]:
        scorer = scorer_of(tmp_path, max_tokens, 0.6, Likeliest(5, 40))
        await scorer.start()
        scored = await scorer.score(shards, threading.Event())
        scorer.stop()
        return scored

    for task, (found, values) in zip(shards, asyncio.run(run()), strict=True):
        assert (found.dtype, values.dtype) == (np.int32, np.float32)
        rows, at = [], 0
        for length in task["lengths"].tolist():
            ids = torch.from_numpy(task["token_ids"][at : at + length].astype(np.int64))
            with torch.inference_mode():
                logprobs = (model(input_ids=ids[None]).logits[0] / 0.6).log_softmax(-1)
            rows.append(logprobs[np.flatnonzero(task["loss_mask"][at : at + length]) - 1])
            at += length
        wanted = torch.cat(rows)
        assert len(found) == len(wanted) == np.count_nonzero(task["loss_mask"])
        top = wanted[:, :40].topk(5)
        assert np.abs(values - top.values.numpy()).max() < 1e-4
        assert np.abs(wanted.gather(1, torch.from_numpy(found).long()).numpy() - values).max() < 1e-4
        assert found.max() < 40


def test_small_micro_batches_give_the_same_values_and_report_progress_more_often(tmp_path: Path) -> None:
    shards = tasks()

    async def run(max_tokens: int) -> tuple[list[Array], int]:
        scorer = scorer_of(tmp_path, max_tokens)
        await scorer.start()
        scored = [values for (values,) in await scorer.score(shards, threading.Event())]
        scorer.stop()
        return scored, scorer.progress

    whole, few = asyncio.run(run(4096))
    parts, many = asyncio.run(run(16))
    assert many > few
    assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(whole, parts, strict=True))


def test_a_block_whose_lease_ended_is_abandoned(tmp_path: Path) -> None:
    async def run() -> None:
        scorer = scorer_of(tmp_path, 16)
        await scorer.start()
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(LeaseLost):
            await scorer.score(tasks(), cancel)
        scorer.stop()

    asyncio.run(run())


def test_a_scorer_that_was_offloaded_and_restored_gives_bit_identical_results(tmp_path: Path) -> None:
    shards = tasks()

    async def run() -> None:
        scorer = scorer_of(tmp_path, 4096)
        await scorer.start()
        before = await scorer.score(shards, threading.Event())
        for _ in range(2):
            await scorer.leave()
            await scorer.come_back()
            after = await scorer.score(shards, threading.Event())
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        # The same holds for weights that the scorer has received since it was last offloaded.
        model = load_model(MODEL, "float32")
        with torch.no_grad():
            for tensor in named_weights(model).values():
                tensor.mul_(1.05)
            ids = np.arange(4, 12)
            found, _ = token_logprobs(model, ids, np.array([8]), np.eye(1, 8)[0] == 0, 1.0, 4096)
        canary = Canary(token_ids=ids.astype(np.int32), logprobs=found.numpy()[1:], tolerance=1e-4)
        ref = weights_ref(1, 3, canary, nbytes=0)
        assert await scorer.init_model(ref, {name: each.numpy() for name, each in named_weights(model).items()}) < 1e-4
        taken = await scorer.score(shards, threading.Event())
        assert any(not np.array_equal(a, b) for a, b in zip(before, taken, strict=True))
        await scorer.leave()
        await scorer.come_back()
        after = await scorer.score(shards, threading.Event())
        assert all(np.array_equal(a, b) for a, b in zip(taken, after, strict=True))
        await scorer.leave()
        assert (tmp_path / "reference-0.bin").stat().st_size > 3_000_000
        scorer.stop()
        assert not (tmp_path / "reference-0.bin").exists()

    asyncio.run(run())


def test_a_lease_stays_alive_while_its_rank_waits_for_a_rank_that_is_still_fetching() -> None:
    lease = Lease(grant(), lambda: 0)
    book = book_of(lease)

    async def scenario() -> None:
        there = asyncio.Event()

        class Group:
            rank, world_size, generation, deadline_s = 0, 2, 1, 5.0

            async def meet(self, round_name: str, failure: str = "") -> None:
                await there.wait()

            async def together(self, name: str, work: Awaitable[Any]) -> Any:
                return await work

        class NoModel:
            version = BEGINNING

            async def come_back(self) -> None:
                assert not gets_on(book)  # No rank is waiting now.

            async def score(self, shards: Any, cancel: Any) -> list[Any]:
                return []

        async def call(*_: Any, **__: Any) -> None:
            await there.wait()

        model = SimpleNamespace(service="reference", stage="reference")
        parts: list[Any] = [None, model, NoModel(), None, OwnDevices(), Group(), [SimpleNamespace(call=call)], ""]
        made = Scoring(*parts)
        leading = asyncio.create_task(made.lead(lease, book, []))
        await asyncio.sleep(0.01)
        assert gets_on(book)
        there.set()
        await leading

    asyncio.run(scenario())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_reward_model_gives_each_text_the_value_that_the_classifier_of_transformers_gives_it(
    deterministic: bool, tmp_path: Path
) -> None:
    folder = reward_folder(tmp_path / "classifier")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rng = np.random.default_rng(0)
    tasks = []
    for samples in (2, 1, 3):
        lengths = rng.integers(1, 20, samples).astype(np.int32)
        tasks.append({"read_ids": rng.integers(3, 20, lengths.sum()).astype(np.int32), "read_lengths": lengths})

    async def scores(tasks: list[dict[str, Array]]) -> list[Array]:
        scorer = FrozenScorer(
            lambda: FrozenTorch(folder, "float32", 32, passes=FASTEST, head="value"),
            source=folder,
            threads=1,
            temperature=1.0,
            deterministic=deterministic,
            head="value",
        )
        await scorer.start()
        try:
            return [made for (made,) in await scorer.score(tasks, threading.Event())]
        finally:
            scorer.stop()

    found = asyncio.run(scores(tasks))
    assert [(len(values), values.dtype) for values in found] == [(2, np.float32), (1, np.float32), (3, np.float32)]
    for task, values in zip(tasks, found, strict=True):
        texts = np.split(task["read_ids"], np.cumsum(task["read_lengths"])[:-1])
        wanted = [classifier(torch.from_numpy(ids[None].astype(np.int64))).logits.item() for ids in texts]
        assert values == pytest.approx(wanted, abs=1e-5)
    if deterministic:  # whatever else is in the lease
        (alone,) = asyncio.run(scores(tasks[2:]))
        assert alone.tobytes() == found[2].tobytes()


def test_a_reward_model_whose_value_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "classifier")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": np.full((1, 128), np.inf, np.float32)}, folder / "model.safetensors")
    made = FrozenTorch(folder, "float32", 32, head="value")
    scorer = FrozenScorer(lambda: made, source=folder, threads=1, temperature=1.0, head="value")
    task = {"read_ids": np.array([5, 6], np.int32), "read_lengths": np.array([2], np.int32)}
    asyncio.run(scorer.start())
    with pytest.raises(BadInput, match="gives a text the value"):
        asyncio.run(scorer.score([task], threading.Event()))
    scorer.stop()
