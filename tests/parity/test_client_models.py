"""Compares the models of clients with plain torch loops over peft's adapters, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proto.messages import AdamW, AdapterSpec, LossSpec, TaskHandle
from proto.tensors import Array
from services.policy_trainer.models import Datum, client_loss, shards_of
from services.policy_trainer.worker import given_loss, samples
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.given_loss import GivenLoss
from services.policy_trainer.worker.training_state import TrainingState
from shared.model.adapter import AdapterStart
from shared.ranks.layout import Layout, RankPlace
from shared.topology.lora import WITH_HEAD, Lora
from shared.topology.models import Head
from shared.topology.passes import FASTEST
from tests.parity.groups import run_group
from tests.parity.test_adapter_gradients import base_of, theirs

TEMPERATURE = 0.8
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SMALL = AdapterSpec(rank=3, alpha=7.0, seed=5, groups=["attention"])
LARGE = AdapterSpec(rank=8, alpha=32.0, seed=6, groups=["attention", "mlp", "unembed"])
ADAM = AdamW(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=0.3)
SLOTS = 8
LOSSES = {
    "cross_entropy": client_loss("cross_entropy", {}, TEMPERATURE),
    "importance_sampling": client_loss("importance_sampling", {}, TEMPERATURE),
    "ppo": client_loss("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, TEMPERATURE),
    "cispo": client_loss("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, TEMPERATURE),
    "dro": client_loss("dro", {"beta": 0.3}, TEMPERATURE),
}


def backend_of(place: RankPlace, folder: Path, spec: AdapterSpec, max_tokens: int = 16) -> TorchBackend:
    """Return a float64 backend whose slots hold the adapter `spec` with random weights."""
    lora = Lora(rank=SLOTS, alpha=SLOTS, target_modules=WITH_HEAD, export_merged=False)
    options = BackendOptions(
        max_tokens, 1, device="cpu", scratch=folder / "off", passes=FASTEST, adapter=AdapterStart(lora, seed=3)
    )
    model = base_of("qwen3")

    def load(_: Path, __: str, ___: Head) -> torch.nn.Module:
        return copy.deepcopy(model)

    made = TorchBackend(folder, "float64", options, place, load=load, load_shapes=load)
    assert made.slots is not None
    made.slots.check(spec)
    first = made.slots.trimmed(made.slots.first(spec), spec)
    generator = torch.Generator().manual_seed(9)
    weights = {
        name: torch.randn(tensor.shape, dtype=torch.float64, generator=generator) * 0.2
        for name, tensor in sorted(first.weights.items())
    }
    made.load_state(made.slots.padded(TrainingState(weights, {}), spec))
    made.slots.use(spec)
    return made


def data_of(loss: LossSpec, several: int = 1) -> list[Datum]:
    """Return seven data, of which some have a common prefix. The first target of RL data has advantage 0."""
    rng, base = np.random.default_rng(1), base_of("qwen3").requires_grad_(False)
    prefix, data = rng.integers(3, 61, size=5), []
    for number in range(7):
        ids = np.concatenate([prefix[: 5 * (number % 2)], rng.integers(3, 61, size=rng.integers(1, 9))])
        shape = (len(ids),) if several == 1 else (len(ids), several)
        targets = rng.integers(0, 61, size=shape)
        if loss.name == "cross_entropy":
            data.append(Datum(ids, targets, weights=rng.normal(size=shape).astype(np.float32)))
        else:
            advantages = rng.normal(size=shape).astype(np.float32)
            logprobs = logprobs_of(base, loss, ids, targets).numpy() + rng.normal(0.0, 0.2, size=shape)
            if loss.name != "dro":
                advantages[0], logprobs[0] = 0.0, -1e9  # what a client may write where nothing was sampled
            data.append(Datum(ids, targets, advantages=advantages, logprobs=logprobs.astype(np.float32)))
    return data


def logprobs_of(model: Any, loss: LossSpec, ids: Array, targets: Array) -> Tensor:
    logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0] / loss.temperature
    of_targets = logits.log_softmax(-1).gather(1, torch.from_numpy(targets).view(len(ids), -1))
    return cast(Tensor, of_targets.view(targets.shape))


def accumulate(
    made: TorchBackend, loss: LossSpec, data: Sequence[Datum], *, backward: bool = True
) -> tuple[dict[str, float], list[Array]]:
    """Do the work of one call. Return the sums and the log-probs of each datum."""
    shards = [shards_of(datum, loss) for datum in data]
    keys = shards[0] if shards else shards_of(data_of(loss)[0], loss)
    columns = {key: [each[key] for each in shards] for key in keys}
    samples.check(
        [TaskHandle(f"api/1/{at}", 1, 1, len(data[at].token_ids), 0, [0]) for at in range(len(data))], columns
    )
    tokens = samples.join(columns)
    bound = GivenLoss(loss, tokens.flat, "cpu")
    sums = made.forward_backward(
        given_loss.sequences_of(tokens), loss.temperature, bound, entropy="none", backward=backward
    )
    return sums, np.split(bound.logprobs(), tokens.targets_of_task.cumsum()[:-1])


def plain_loss(model: Any, loss: LossSpec, data: Sequence[Datum]) -> tuple[Tensor, list[Tensor]]:
    """Return the loss as the documentation of Tinker writes it, and the log-probs of each datum."""
    total, kept = torch.zeros((), dtype=torch.float64), []
    for datum in data:
        lp = logprobs_of(model, loss, datum.token_ids, datum.targets)
        kept.append(lp.detach())
        if loss.name == "cross_entropy":
            total = total - (torch.from_numpy(datum.weights).double() * lp).sum()
            continue
        counted = datum.advantages != 0  # type: ignore[comparison-overlap]
        lp, q, advantages = (
            each[torch.from_numpy(counted)]
            for each in (lp, torch.from_numpy(datum.logprobs).double(), torch.from_numpy(datum.advantages).double())
        )
        r = (lp - q).exp()
        clipped = r.clamp(loss.clip_low, loss.clip_high)
        match loss.name:
            case "importance_sampling":
                total = total - (r * advantages).sum()
            case "ppo":
                total = total - torch.minimum(r * advantages, clipped * advantages).sum()
            case "cispo":
                total = total - (clipped.detach() * lp * advantages).sum()
            case "dro":
                total = total - (lp * advantages - 0.5 * loss.beta * (lp - q) ** 2).sum()
    return total, kept


def gradients_of(made: TorchBackend, spec: AdapterSpec) -> dict[str, Tensor]:
    """Return the gradients without padding, having checked that those of the padding are exactly 0."""
    grads = {name: master.grad for name, master in made._trained.masters.items() if master.grad is not None}
    whole = {name: made._trained.whole(grad) for name, grad in grads.items()}
    assert made.slots is not None
    cut = made.slots.trimmed(TrainingState(whole, {}), spec).weights
    back = made.slots.padded(TrainingState(cut, {}), spec).weights
    assert all(torch.equal(back[name], whole[name]) for name in whole)
    return cut


def lora_of(spec: AdapterSpec) -> Lora:
    names = {"attention": ATTENTION, "mlp": MLP, "unembed": ("lm_head",)}
    modules = tuple(name for group in spec.groups for name in names[group])
    return Lora(rank=spec.rank, alpha=spec.alpha, target_modules=modules, export_merged=False)


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "whole"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_five_steps_equal_those_of_a_plain_loop(name: str, spec: AdapterSpec, tmp_path: Path) -> None:
    loss = LOSSES[name]
    data, made = data_of(loss), backend_of(Layout(1).place(0), tmp_path, spec)
    assert made.slots is not None
    before = made.slots.trimmed(made.state(), spec).weights
    wrapped, named = theirs(base_of("qwen3"), lora_of(spec), before)
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        total, expected = plain_loss(wrapped, loss, data)
        total.backward()
        sums, found = accumulate(made, loss, data)
        assert sums["loss"] == pytest.approx(float(total.detach()), rel=1e-10)
        assert sums["tokens"] == sum(datum.targets.size for datum in data)
        assert name not in ("ppo", "cispo") or 0 < sums["clipped"] < sums["tokens"]
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, other.numpy().reshape(-1), rtol=0, atol=2e-6)
        gradients = gradients_of(made, spec)
        largest = max(float(parameter.grad.abs().max()) for parameter in named.values())
        for parameter, each in named.items():
            limit = 1e-12 if step == 1 else 1e-10  # then the weights differ, too
            assert float((gradients[parameter] - each.grad).abs().max()) <= limit * largest, (step, parameter)
        norm = torch.nn.utils.clip_grad_norm_(named.values(), ADAM.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert made.step(step, ADAM) == pytest.approx(float(norm), rel=1e-10)
    after = made.slots.trimmed(made.state(), spec).weights
    for parameter, each in named.items():
        assert float((after[parameter] - each.detach()).abs().max()) <= 1e-10, parameter
        assert float((after[parameter] - before[parameter]).abs().max()) > 1e-3, parameter


def test_several_targets_of_a_token_have_log_probs_and_weights_of_their_own(tmp_path: Path) -> None:
    loss = LOSSES["cross_entropy"]
    data = [*data_of(loss, several=3), *data_of(loss)[:2]]  # the number of targets may differ from datum to datum
    made = backend_of(Layout(1).place(0), tmp_path, LARGE)
    assert made.slots is not None
    wrapped, named = theirs(base_of("qwen3"), lora_of(LARGE), made.slots.trimmed(made.state(), LARGE).weights)
    total, expected = plain_loss(wrapped, loss, data)
    total.backward()
    sums, found = accumulate(made, loss, data)
    assert sums["loss"] == pytest.approx(float(total.detach()), rel=1e-10)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other.numpy().reshape(-1), rtol=0, atol=2e-6)
    gradients = gradients_of(made, LARGE)
    largest = max(float(parameter.grad.abs().max()) for parameter in named.values())
    for parameter, each in named.items():
        assert float((gradients[parameter] - each.grad).abs().max()) <= 1e-12 * largest, parameter


@pytest.mark.parametrize("name", LOSSES)
def test_a_forward_pass_returns_the_same_numbers_and_leaves_the_gradient_alone(name: str, tmp_path: Path) -> None:
    loss = LOSSES[name]
    data, made = data_of(loss), backend_of(Layout(1).place(0), tmp_path, LARGE)
    nothing = accumulate(made, loss, data, backward=False)
    assert all(master.grad is None for master in made._trained.masters.values())
    sums, found = accumulate(made, loss, data)
    gradients = {name: tensor.clone() for name, tensor in gradients_of(made, LARGE).items()}
    again, logprobs = accumulate(made, loss, data, backward=False)
    assert nothing[0] == sums == again
    for one, two, three in zip(nothing[1], found, logprobs, strict=True):
        assert np.array_equal(one, two)
        assert np.array_equal(two, three)
    assert all(torch.equal(tensor, gradients[name]) for name, tensor in gradients_of(made, LARGE).items())


def in_calls(made: TorchBackend, calls: int, place: RankPlace | None = None) -> dict[str, Tensor]:
    """Take two steps, each from `calls` calls. Of several ranks, each has every other datum of a call."""
    loss = LOSSES["importance_sampling"]
    data = data_of(loss)
    for step in (1, 2):
        for chunk in np.array_split(np.arange(len(data)), calls):
            mine = chunk if place is None else chunk[place.dp_rank :: place.layout.dp]
            accumulate(made, loss, [data[at] for at in mine])
        made.step(step, ADAM)
    return made.state().weights


def in_a_group(place: RankPlace, folder: Path) -> None:
    """Write the weights after two steps, which follow a forward pass with one datum, so that a rank was idle."""
    made = backend_of(place, folder, LARGE)
    loss = LOSSES["importance_sampling"]
    some = data_of(loss)[:1] if place.dp_rank == 0 else []
    accumulate(made, loss, some, backward=False)
    weights = in_calls(made, 2, place)
    save_file(weights or {"none": torch.zeros(1)}, folder / f"rank-{place.rank}" / "made.safetensors")


def test_neither_the_number_of_calls_nor_of_ranks_changes_the_result(tmp_path: Path) -> None:
    whole = in_calls(backend_of(Layout(1).place(0), tmp_path, LARGE), 1)
    for calls in (2, 7):
        parts = in_calls(backend_of(Layout(1).place(0), tmp_path, LARGE), calls)
        assert max(float((parts[name] - whole[name]).abs().max()) for name in whole) <= 1e-12
    # Context parallelism adds in another order, and AdamW's division by small second moments magnifies the rounding; by
    # how much depends on the CPU's vector instructions.
    for layout, name, limit in ((Layout(2), "dp2", 1e-12), (Layout(2, cp=2), "cp2", 1e-11)):
        run_group("tests.parity.test_client_models:in_a_group", layout, tmp_path / name)
        parts = load_file(tmp_path / name / "rank-0" / "made.safetensors")
        assert max(float((parts[key] - whole[key]).abs().max()) for key in whole) <= limit, name
