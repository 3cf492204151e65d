"""Checks an adapter's gradients and updates against those of the library peft, and what several ranks keep of a model
whose adapter is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from shared.colocation.shelf import local_part
from shared.model.adapter import AdapterStart, adapters_of, adapters_off
from shared.model.logprobs import Scores
from shared.ranks.layout import Layout, RankPlace
from shared.tensors_torch import to_numpy
from shared.topology.lora import Lora
from shared.topology.models import Head
from shared.topology.passes import FASTEST
from tests.parity.gradient_cases import cases
from tests.parity.groups import run_group
from tests.parity.test_gradients_torch import backend_of, gradient
from tests.unit.policy_trainer.training import adamw
from tests.unit.tiny_models import make_model, plain_logprobs, ragged

UPDATES = 5
TEMPERATURE = 0.8
HEAD = ("q_proj", "down_proj", "lm_head")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"kind": "qwen3", "tie_word_embeddings": True, "head_dim": 12, "attention_bias": True},
    "llama": {"kind": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
}


def base_of(family: str) -> Any:
    """Return a model in float64 with biases that are not zero."""
    model = make_model(dtype=torch.float64, **FAMILIES[family])
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith(".bias")]
    assert biases
    with torch.no_grad():
        for bias in biases:
            bias.normal_(0.0, 0.1)
    return model


def ours(model: Any, lora: Lora, folder: Path, *, recompute: str, max_tokens: int) -> TorchBackend:
    options = BackendOptions(
        max_tokens=max_tokens,
        threads=1,
        device="cpu",
        scratch=folder,
        recompute=recompute,
        passes=FASTEST,
        adapter=AdapterStart(lora, seed=3),
    )  # type: ignore[arg-type]

    def load(_: Path, __: str, ___: Head) -> torch.nn.Module:
        return copy.deepcopy(model)

    made = TorchBackend(folder, "float64", options, Layout(1).place(0), load=load)
    torch.manual_seed(2)
    weights = {name: torch.randn(shape, dtype=torch.float64) * 0.2 for name, shape in made._trained.shapes.items()}
    made._trained.set_weights(weights)
    return made


def theirs(model: Any, lora: Lora, weights: dict[str, Tensor]) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """Return peft's model with the adapter `weights`, and its parameters under our names."""
    targets = lora.target_modules
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
    named = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert named.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.data = weights[name].to(torch.float64, copy=True)
    return wrapped, named


def signs(tokens: int) -> Tensor:
    return torch.randn(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def weighed(coefficients: Tensor) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return a loss that is a sum of log-probs with these coefficients [T]."""

    def loss(scores: Scores, _: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return (coefficients[scores.tokens] * scores.outputs).sum(), {}

    return loss


@pytest.mark.parametrize(
    ("recompute", "max_tokens"), [("none", 4096), ("layers", 12), ("selective", 12)], ids=["whole", "layers", "parts"]
)
@pytest.mark.parametrize("targets", ["all-linear", HEAD], ids=["layers", "with head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_updates_equal_those_of_peft(
    family: str, targets: Any, recompute: str, max_tokens: int, tmp_path: Path
) -> None:
    """alpha / rank is not a power of two. The first gradient is clipped."""
    lora, model = Lora(export_merged=False, rank=3, alpha=7.0, target_modules=targets), base_of(family)
    backend = ours(model, lora, tmp_path, recompute=recompute, max_tokens=max_tokens)
    first = {name: tensor.clone() for name, tensor in backend.weights().items()}
    wrapped, named = theirs(model, lora, first)
    # Weight decay is large, so that an update without it would differ.
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    arrays = ragged(tasks=3)
    coefficients, mask = signs(len(arrays[0])), torch.from_numpy(arrays[2]).double()
    norms: list[float] = []
    clip = 0.0
    for step in range(1, UPDATES + 1):
        (coefficients * mask * plain_logprobs(wrapped, *arrays, TEMPERATURE)).sum().backward()
        backend.forward_backward(Sequences(*arrays), TEMPERATURE, weighed(coefficients), entropy="none")
        gradients = {name: master.grad for name, master in backend._trained.masters.items()}
        largest = max(float(parameter.grad.abs().max()) for parameter in named.values())
        for name, parameter in named.items():
            assert float((gradients[name] - parameter.grad).abs().max()) <= 1e-12 * largest, (step, name)
        norms.append(float(torch.linalg.vector_norm(torch.stack([each.grad.norm() for each in named.values()]))))
        clip = clip or 0.9 * norms[0]
        torch.nn.utils.clip_grad_norm_(named.values(), clip)
        optimizer.step()
        optimizer.zero_grad()
        numbers = adamw(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=clip)
        assert backend.step(step, numbers) == pytest.approx(norms[-1], rel=1e-12)
    for name, tensor in backend.weights().items():
        assert float((tensor - named[name].detach()).abs().max()) <= 1e-10, name
        assert float((tensor - first[name]).abs().max()) > 1e-3, name
    backend.drop_gradients()
    with adapters_off(backend.called):
        off = backend.forward(Sequences(*arrays), TEMPERATURE)
    expected = to_numpy(plain_logprobs(model, *arrays, TEMPERATURE).float())
    np.testing.assert_allclose(off, expected, rtol=0, atol=1e-6)


def pieces(place: RankPlace, folder: Path) -> None:
    """Write the gradients of a bfloat16 model's adapter, and what this rank keeps of the model."""
    backend = backend_of("bfloat16", place, folder, kind="adapter")
    found, _, _ = gradient(backend, next(cases()), "adapter")
    trained, frozen = ([p for p in backend.model.parameters() if p.requires_grad == asked] for asked in (True, False))
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}
    assert len(trained) == 2 * len(adapters_of(backend.model))
    before = [local_part(parameter).clone() for parameter in frozen]
    gradient(backend, next(cases()), "adapter")
    assert backend.step(1, adamw()) >= 0
    assert all(torch.equal(local_part(parameter), old) for parameter, old in zip(frozen, before, strict=True))
    out = {f"grad/{name}": value for name, value in found.items() if place.rank == 0}
    out["bytes"] = torch.tensor([sum(local_part(p).nbytes for p in kept) for kept in (trained, frozen)])
    save_file(out, folder / f"rank-{place.rank}" / "made.safetensors")


def test_ranks_keep_the_frozen_weights_in_16_bits(tmp_path: Path) -> None:
    run_group("tests.parity.test_adapter_gradients:pieces", Layout(2), tmp_path / "dp2")
    alone = backend_of("bfloat16", Layout(1).place(0), tmp_path, kind="adapter")
    expected, _, _ = gradient(alone, next(cases()), "adapter")
    made = [load_file(tmp_path / "dp2" / f"rank-{rank}" / "made.safetensors") for rank in range(2)]
    trained, frozen = (
        sum(p.numel() for p in alone.model.parameters() if p.requires_grad == asked) for asked in (True, False)
    )
    assert sum(each["bytes"] for each in made).tolist() == [4 * trained, 2 * frozen]
    scale = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert float((made[0][f"grad/{name}"] - value).abs().max()) <= 0.05 * scale, name
