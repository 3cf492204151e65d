"""Checks gradients and losses of the torch backend: every split gives the same values as one process with one
micro-batch."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from proto.messages import BatchMeta, ForwardBackwardDone, StepBatch
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.worker import shards
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from shared.model.adapter import AdapterStart
from shared.model.load import blocks_of
from shared.ranks.layout import Layout, RankPlace
from shared.topology.lora import Lora
from shared.topology.models import Head
from shared.topology.passes import FASTEST
from tests.parity.gradient_cases import (
    RUNS,
    VOCAB,
    Case,
    back,
    cases,
    forward,
    nothing_trained,
    outputs_of,
)
from tests.parity.gradient_cases import cases_of as cases_of_head
from tests.parity.groups import run_group, sums_of
from tests.unit.policy_trainer.training import adamw
from tests.unit.tiny_models import make_model

Kind = Head | Literal["adapter"]
"""What is trained: a language model, a value model, or an adapter of a language model."""
KINDS: tuple[Kind, ...] = ("language", "value", "adapter")
LORA = Lora(
    rank=3,
    alpha=7.0,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    export_merged=False,
)
"""The output layer is tied to the embedding, and alpha / rank is not a power of two."""
LIMITS = {"float64": 1e-12, "float32": 1e-5}
SUMMED = {"float64": 1e-12, "bfloat16": 0.05}
"""Limits for gradients that are added up once per batch. The passes of a bfloat16 model are less exact."""
SUMMATIONS: list[tuple[Kind, str, int]] = [
    (kind, dtype, memory) for kind in ("language", "adapter") for dtype in SUMMED for memory in (1 << 40, 1)
]
"""The runs that count these additions: what is trained, its precision, and the memory of a rank in bytes."""
LAYOUTS = {"dp2": Layout(2), "cp2": Layout(2, cp=2), "dp2xcp2": Layout(4, cp=2)}
ALONE = Layout(1).place(0)
UNEVEN = [case for case in cases() if case.name in ("gspo", "sequences-masked")]
MICRO_BATCH = 20
"""Cases with several micro-batches of this size on both of two ranks; the ranks have different numbers of them."""


def backend_of(
    dtype: str,
    place: RankPlace,
    folder: Path,
    max_tokens: int = 4096,
    recompute: str = "none",
    kind: Kind = "language",
) -> TorchBackend:
    def load(_: Path, name: str, head: Head) -> torch.nn.Module:
        kind = getattr(torch, name)
        return make_model("qwen3", dtype=kind, head=head, head_dim=12, tie_word_embeddings=True, vocab_size=VOCAB)

    options = BackendOptions(
        max_tokens=max_tokens,
        threads=1,
        device="cpu",
        scratch=folder / f"of-{os.getpid()}",
        recompute=recompute,
        passes=FASTEST,
        head=head_of(kind),
        adapter=AdapterStart(LORA, seed=0) if kind == "adapter" else None,
    )  # type: ignore[arg-type]
    made = TorchBackend(folder, dtype, options, place, load=load, load_shapes=load)
    if kind == "adapter":  # of a new adapter, one half has no gradient
        torch.manual_seed(1)
        made._trained.set_weights({name: torch.randn(shape) * 0.1 for name, shape in made._trained.shapes.items()})
    return made


def head_of(kind: Kind) -> Head:
    return "value" if kind == "value" else "language"


def cases_of(kind: Kind) -> list[Case]:
    """Return the cases for a model of this kind. The loss knows nothing of adapters, so few cases are enough."""
    return [*UNEVEN, cases_of_head("language")[0]] if kind == "adapter" else cases_of_head(kind)


def gradient(
    backend: TorchBackend, case: Case, kind: Kind = "language"
) -> tuple[dict[str, torch.Tensor], dict[str, float], np.ndarray]:
    """Return the whole gradients (on rank 0), this rank's sums, and the outputs of a forward pass."""
    outputs = forward(backend, case, head_of(kind))
    sums = back(backend, case, head_of(kind))
    trained = backend._trained
    found = {name: trained.whole(master.grad) for name, master in trained.masters.items()}
    backend.drop_gradients()
    return found, sums, outputs


def work(place: RankPlace, folder: Path) -> None:
    """Run every case, micro-batch size and precision on this rank. Rank 0 keeps the gradients."""
    backends = {}
    for kind, (dtype, max_tokens) in itertools.product(KINDS, RUNS):
        backend = backend_of(dtype, place, folder, max_tokens, "layers" if max_tokens == 30 else "none", kind)
        backends[kind] = backend
        for case in cases_of(kind):
            found, sums, outputs = gradient(backend, case, kind)
            out = {f"grad/{name}": value for name, value in found.items() if place.rank == 0}
            out |= {f"sum/{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
            out["outputs"] = torch.from_numpy(outputs.copy())
            save_file(out, folder / f"rank-{place.rank}" / f"{kind}-{dtype}-{max_tokens}-{case.name}.safetensors")
    for kind, case in itertools.product(KINDS, nothing_trained()):
        backend = backends[kind]
        before = backend.state().weights
        back(backend, case, head_of(kind))
        assert backend.step(1, adamw()) == 0
        assert all(torch.equal(value, before[name]) for name, value in backend.state().weights.items())
    critic = backend_of("bfloat16", place, folder, kind="value")
    values = torch.from_numpy(forward(critic, cases_of("value")[0], "value"))
    assert not (values.bfloat16() == values)[values != 0].any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_those_of_one_process_and_one_micro_batch(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    run_group("tests.parity.test_gradients_torch:work", layout, tmp_path / name)
    for kind, (dtype, limit) in itertools.product(KINDS, LIMITS.items()):
        alone = backend_of(dtype, ALONE, tmp_path, kind=kind)
        for case in cases_of(kind):
            expected, sums, outputs = gradient(alone, case, kind)
            scale = max(float(value.abs().max()) for value in expected.values())
            assert scale > 1e-4
            assert kind == "value" or 0 < sums["masked"] < sums["tokens"] or not case.spec.ratio_mask
            for max_tokens in (size for precision, size in RUNS if precision == dtype):
                label = f"{kind}-{dtype}-{max_tokens}-{case.name}"
                parts = [
                    load_file(tmp_path / name / f"rank-{rank}" / f"{label}.safetensors")
                    for rank in range(layout.world_size)
                ]
                for weight, value in expected.items():
                    error = float((parts[0][f"grad/{weight}"] - value).abs().max()) / scale
                    assert error <= limit, f"{label} {weight}: {error:.2e}"
                assert sums_of(parts) == pytest.approx(sums, rel=1e-5, abs=1e-6), label
                if kind != "value":
                    _importance_agrees(case, sums_of(parts))
                for rank, part in enumerate(parts):
                    mine = outputs_of(layout.place(rank), case, outputs)
                    assert np.abs(part["outputs"].numpy() - mine).max(initial=0.0) <= 1e-5


class ReduceScatters(TorchDispatchMode):
    """Counts the collectives that add up the ranks' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function.name().startswith("c10d::_reduce_scatter")
        return function(*args, **(kwargs or {}))


def count_sums(place: RankPlace, folder: Path) -> None:
    """Write how often the gradients of each case were added up over the ranks, and the gradients, with whole gradients
    kept until the last micro-batch and without. In between, a batch fails before its second backward pass. Layers are
    recomputed selectively."""
    for kind, dtype, memory_bytes in SUMMATIONS:
        with patch.object(shards, "_memory_bytes", lambda mesh, found=memory_bytes: found):
            backend = backend_of(dtype, place, folder, MICRO_BATCH, "selective", kind)
        out: dict[str, torch.Tensor] = {}
        for case in UNEVEN:
            _fail_in_second_micro_batch(backend, case)
            with ReduceScatters() as sums:
                found, _, _ = gradient(backend, case)
            out[f"calls/{case.name}"] = torch.tensor(sums.calls)
            out |= {f"grad/{case.name}/{name}": value for name, value in found.items() if place.rank == 0}
        save_file(out, folder / f"rank-{place.rank}" / f"{kind}-{dtype}-{memory_bytes}.safetensors")


def _fail_in_second_micro_batch(backend: TorchBackend, case: Case) -> None:
    flat, advantages, weights = case.of(backend.place.dp_rank, backend.place.layout.dp)
    loss = BatchLoss(case.spec, flat, advantages, weights, "cpu")
    passes = 0

    def failing(*arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal passes
        passes += 1
        if passes == 2:
            raise ValueError("a loss that fails")
        return loss(*arguments)

    sequences = Sequences(flat["token_ids"], flat["lengths"], flat["loss_mask"])
    with pytest.raises(ValueError, match="a loss that fails"):
        backend.forward_backward(sequences, case.spec.temperature, failing, entropy=loss.entropy)
    backend.drop_gradients()


def test_ranks_with_enough_memory_add_up_their_gradients_once_per_batch(tmp_path: Path) -> None:
    run_group("tests.parity.test_gradients_torch:count_sums", Layout(2), tmp_path / "dp2")
    for kind, dtype, memory_bytes in SUMMATIONS:
        alone = backend_of(dtype, ALONE, tmp_path, kind=kind)
        modules = 1 + len(blocks_of(alone.model))
        file = f"{kind}-{dtype}-{memory_bytes}.safetensors"
        found = [load_file(tmp_path / "dp2" / f"rank-{rank}" / file) for rank in range(2)]
        for case in UNEVEN:
            passes = max(len(_micro_batches(alone, case, rank)) for rank in range(2))
            assert passes > min(len(_micro_batches(alone, case, rank)) for rank in range(2)) > 1
            sums = 1 if memory_bytes > 1 else passes
            assert [int(each[f"calls/{case.name}"]) for each in found] == [modules * sums] * 2
            expected, _, _ = gradient(alone, case)
            scale = max(float(value.abs().max()) for value in expected.values())
            for weight, value in expected.items():
                error = float((found[0][f"grad/{case.name}/{weight}"] - value).abs().max()) / scale
                assert error <= SUMMED[dtype], f"{kind} {dtype} {case.name} {weight}: {error:.2e}"


def _micro_batches(backend: TorchBackend, case: Case, rank: int) -> list[Any]:
    flat, _, _ = case.of(rank, 2)
    arrays = flat["token_ids"], flat["lengths"], flat["loss_mask"]
    return backend._trained.scorer.plan(*arrays, case.spec.temperature, MICRO_BATCH)


def _importance_agrees(case: Case, sums: dict[str, float]) -> None:
    """Compare the importance-weight metrics, computed from the sums of all ranks, with their formulas over the
    batch."""
    if case.spec.anchor != "proximal":
        return
    metrics = StepMetrics(step=1)
    metrics.policy.add_gradient(ForwardBackwardDone(sums=sums, seconds=1.0))
    row = metrics.row(StepBatch(step=1, batch=BatchMeta(tasks=[]), scalars={}), step_s=1.0)
    trained = case.flat["loss_mask"].astype(bool)
    delta = (case.flat["prox_logprobs"].astype(np.float64) - case.flat["rollout_logprobs"])[trained]
    v = np.minimum(np.exp(delta), case.spec.tis_cap or np.inf)
    expected = {
        "rollout/kl": -delta.mean(),
        "rollout/k3_kl": np.mean(np.expm1(delta) - delta),
        "rollout/is_mean": v.mean(),
        "rollout/is_max": np.exp(delta.max()),
        "rollout/is_eff_sample_size": v.sum() ** 2 / (len(v) * np.sum(v**2)),
    }
    expected |= {"rollout/is_capped_fraction": np.mean(np.exp(delta) > 2.0)} if case.spec.tis_cap else {}
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6), case.name
    assert ("rollout/is_capped_fraction" in row) == (case.spec.tis_cap > 0)


def test_gradients_are_the_same_at_every_micro_batch_size(tmp_path: Path) -> None:
    whole = {kind: backend_of("float64", ALONE, tmp_path, kind=kind) for kind in KINDS}
    for kind, case in ((each, case) for each in KINDS for case in cases_of(each)):
        expected, sums, _ = gradient(whole[kind], case, kind)
        scale = max(float(value.abs().max()) for value in expected.values())
        longest, total = int(case.flat["lengths"].max()), int(case.flat["lengths"].sum())
        for max_tokens in range(longest, total, 13):
            found, again, _ = gradient(backend_of("float64", ALONE, tmp_path, max_tokens, kind=kind), case, kind)
            worst = max(float((found[name] - value).abs().max()) for name, value in expected.items())
            assert worst / scale <= LIMITS["float64"], f"{case.name} in micro-batches of {max_tokens}"
            assert again == pytest.approx(sums, rel=1e-6)
