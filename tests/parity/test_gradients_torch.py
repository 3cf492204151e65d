"""Checks gradients and losses of the torch backend: every split gives the same values as one process with one
micro-batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.messages import BatchMeta, ForwardBackwardDone, StepBatch
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.batch_loss import BatchLoss
from shared.ranks.layout import Layout, Place
from shared.topology.algorithm import Optimizer
from tests.parity.gradient_cases import RUNS, VOCAB, Case, cases, nothing_trained
from tests.parity.groups import run_group, sums_of
from tests.unit.tiny_models import make_model

LIMITS = {"float64": 1e-12, "float32": 1e-5}
LAYOUTS = {"dp2": Layout(2), "cp2": Layout(2, cp=2), "dp2xcp2": Layout(4, cp=2)}
ALONE = Layout(1).place(0)


def backend_of(dtype: str, place: Place, folder: Path, max_tokens: int = 4096, recompute: str = "none") -> TorchBackend:
    def load(_: Path, name: str) -> torch.nn.Module:
        return make_model("qwen3", dtype=getattr(torch, name), head_dim=12, tie_word_embeddings=True, vocab_size=VOCAB)

    options = BackendOptions(max_tokens=max_tokens, threads=1, device="cpu", scratch=folder, recompute=recompute)  # type: ignore[arg-type]
    return TorchBackend(folder, dtype, Optimizer(lr=1e-3), options, place, load=load, load_shapes=load)


def gradient(backend: TorchBackend, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, float], np.ndarray]:
    """Return the whole gradients (on rank 0), this rank's sums, and the log-probs of a forward pass."""
    flat, _, _ = case.of(backend.place.dp_rank, backend.place.layout.dp)
    sequences = Sequences(flat["token_ids"], flat["lengths"], flat["loss_mask"])
    logprobs = backend.forward(sequences, case.spec.temperature)
    sums = back(backend, case)
    trained = backend._trained
    found = {name: trained.whole(master.grad) for name, master in trained.masters.items()}
    backend.drop_gradients()
    return found, sums, logprobs


def back(backend: TorchBackend, case: Case) -> dict[str, float]:
    flat, advantages, weights = case.of(backend.place.dp_rank, backend.place.layout.dp)
    sequences = Sequences(flat["token_ids"], flat["lengths"], flat["loss_mask"])
    loss = BatchLoss(case.spec, flat, advantages, weights, "cpu")
    return backend.forward_backward(sequences, case.spec.temperature, loss, entropy=loss.entropy)


def work(place: Place, folder: Path) -> None:
    """Run every case, micro-batch size and precision on this rank. Rank 0 keeps the gradients."""
    for dtype, max_tokens in RUNS:
        backend = backend_of(dtype, place, folder, max_tokens, "layers" if max_tokens == 30 else "none")
        for case in cases():
            found, sums, logprobs = gradient(backend, case)
            out = {f"grad/{name}": value for name, value in found.items() if place.rank == 0}
            out |= {f"sum/{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
            out["logprobs"] = torch.from_numpy(logprobs.copy())
            save_file(out, folder / f"rank-{place.rank}" / f"{dtype}-{max_tokens}-{case.name}.safetensors")
    for case in nothing_trained():
        before = backend.state().weights
        back(backend, case)
        assert backend.step(1).grad_norm == 0
        assert all(torch.equal(value, before[name]) for name, value in backend.state().weights.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_those_of_one_process_and_one_micro_batch(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    run_group("tests.parity.test_gradients_torch:work", layout, tmp_path / name)
    for dtype, limit in LIMITS.items():
        alone = backend_of(dtype, ALONE, tmp_path)
        for case in cases():
            expected, sums, logprobs = gradient(alone, case)
            scale = max(float(value.abs().max()) for value in expected.values())
            assert scale > 1e-4
            assert 0 < sums["masked"] < sums["tokens"] or not case.spec.ratio_mask
            for max_tokens in (size for precision, size in RUNS if precision == dtype):
                label = f"{dtype}-{max_tokens}-{case.name}"
                parts = [
                    load_file(tmp_path / name / f"rank-{rank}" / f"{label}.safetensors")
                    for rank in range(layout.world_size)
                ]
                for weight, value in expected.items():
                    error = float((parts[0][f"grad/{weight}"] - value).abs().max()) / scale
                    assert error <= limit, f"{label} {weight}: {error:.2e}"
                assert sums_of(parts) == pytest.approx(sums, rel=1e-5, abs=1e-6), label
                _importance_agrees(case, sums_of(parts))
                _logprobs_agree(case, layout, parts, logprobs)


def _importance_agrees(case: Case, sums: dict[str, float]) -> None:
    """Compare the importance-weight metrics, computed from the sums of all ranks, with their formulas over the
    batch."""
    if case.spec.anchor != "proximal":
        return
    metrics = StepMetrics(step=1)
    metrics.add_gradient(ForwardBackwardDone(sums=sums, seconds=1.0))
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


def _logprobs_agree(case: Case, layout: Layout, parts: list[dict[str, torch.Tensor]], expected: np.ndarray) -> None:
    for rank, part in enumerate(parts):
        mine = np.repeat(case.owner % layout.dp == layout.place(rank).dp_rank, case.flat["lengths"])
        assert np.abs(part["logprobs"].numpy() - expected[mine]).max(initial=0.0) <= 1e-5


def test_gradients_are_the_same_at_every_micro_batch_size(tmp_path: Path) -> None:
    whole = backend_of("float64", ALONE, tmp_path)
    for case in cases():
        expected, sums, _ = gradient(whole, case)
        scale = max(float(value.abs().max()) for value in expected.values())
        longest, total = int(case.flat["lengths"].max()), int(case.flat["lengths"].sum())
        for max_tokens in range(longest, total, 13):
            found, again, _ = gradient(backend_of("float64", ALONE, tmp_path, max_tokens), case)
            worst = max(float((found[name] - value).abs().max()) for name, value in expected.items())
            assert worst / scale <= LIMITS["float64"], f"{case.name} in micro-batches of {max_tokens}"
            assert again == pytest.approx(sums, rel=1e-6)
