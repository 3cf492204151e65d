"""Tests how much memory a model takes up on hosts and GPUs, and that a model that cannot fit is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launch import preflight
from launch.gpus import visible_gpus
from launch.preflight import Findings
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from shared.ranks.layout import Layout
from shared.topology import Topology, load
from shared.topology.algorithm import Optimizer
from shared.topology.model_files import parameter_count
from shared.topology.model_memory import Part, Place, per_place, per_process, training_parts
from tests.unit.policy_trainer.test_host_waits import gradient
from tests.unit.tiny_models import make_model

TOPOLOGIES = Path(__file__).resolve().parents[4] / "launch" / "topologies"
GIB = 1 << 30
HOME = Place(None, "")


def write_header(file: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of bfloat16 tensors, which takes up no disk space."""
    offset, header = 0, {}
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)


def qwen2(folder: Path, hidden: int, inner: int, layers: int, groups: int, *, tied: bool = True) -> Path:
    """Write the files of a Qwen2 whose weights take up no disk space, because only their header is read."""
    head, vocabulary = 64 if hidden < 1000 else 128, 151_936
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.mlp.{each}_proj.weight": [inner, hidden] for each in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": [hidden, inner]}
        shapes |= {f"{name}.{each}_layernorm.weight": [hidden] for each in ("input", "post_attention")}
        shapes |= {f"{name}.self_attn.{each}_proj.weight": [hidden, hidden] for each in ("q", "o")}
        shapes |= {f"{name}.self_attn.{each}_proj.weight": [groups * head, hidden] for each in ("k", "v")}
        shapes |= {f"{name}.self_attn.q_proj.bias": [hidden]}
        shapes |= {f"{name}.self_attn.{each}_proj.bias": [groups * head] for each in ("k", "v")}
    folder.mkdir(parents=True)
    write_header(folder / "model.safetensors", shapes)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": vocabulary}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def topology(model: Path, *overrides: str, file: str = "quickstart.yaml") -> Topology:
    given = [f"policy.model={model}", "services.batch-store.memory=64GiB", *overrides]
    return load(TOPOLOGIES / file, given, check_files=False)


def elements(given: Topology) -> int:
    return parameter_count(given.policy.model)


@pytest.fixture(scope="module")
def half_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2(tmp_path_factory.mktemp("memory") / "0.5b", 896, 4864, 24, 2)


@pytest.fixture(scope="module")
def one_and_a_half_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2(tmp_path_factory.mktemp("memory") / "1.5b", 1536, 8960, 28, 2)


def test_a_model_in_training_takes_18_bytes_per_parameter_in_bfloat16(half_b: Path, one_and_a_half_b: Path) -> None:
    for model, gib in ((half_b, 8.28), (one_and_a_half_b, 25.87)):
        given = topology(model, "policy.dtype=bfloat16", "algorithm.kl=null", "services.reference=null")
        assert per_process(given, elements(given))["policy-trainer-worker", 0] / GIB == pytest.approx(gib, abs=0.02)
        assert per_place(given, elements(given), {}) == {
            HOME: per_process(given, elements(given))["policy-trainer-worker", 0]
        }


def test_the_calculated_parts_of_one_rank_equal_those_that_the_backend_holds(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for dtype in ("float32", "bfloat16"):
        made = make_model("qwen3", head_dim=16).to(getattr(__import__("torch"), dtype))
        made.save_pretrained(model)
        options = BackendOptions(max_tokens=64, threads=1, device="cpu", scratch=tmp_path / "offloaded")
        backend = TorchBackend(model, dtype, Optimizer(lr=1e-3), options, Layout(1).place(0))
        loaded = sum(each.nbytes for each in [*backend.model.parameters(), *backend._trained.own_masters()])
        scores = load(TOPOLOGIES / "quickstart.yaml", [f"policy.dtype={dtype}", "run.evaluate=true"])
        assert loaded == backend.parameters * sum(training_parts(scores).values())
        gradient(backend)
        gradients = sum(each.grad.nbytes for each in backend._trained.masters.values() if each.grad is not None)
        backend.step(1)
        held = sum(each.nbytes for each in backend.model.parameters())
        held += sum(each.nbytes for each in backend._trained.own_masters())
        held += sum(
            each.nbytes for state in backend._optimizer.state.values() for each in state.values() if each.numel() > 1
        )
        parts = training_parts(load(TOPOLOGIES / "quickstart.yaml", [f"policy.dtype={dtype}"]))
        assert held + gradients == pytest.approx(backend.parameters * sum(parts.values()))


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        (["policy.dtype=float32"], 16),
        (["policy.dtype=bfloat16", "services.policy-trainer.workers=4"], 16 / 4),
        (
            ["policy.dtype=bfloat16", "services.policy-trainer={backend: megatron, gpus: 4, parallel: {tp: 2}}"],
            2 / 2 + 4 / 4 + 4 / 2 + 8 / 4,
        ),
    ],
)
def test_ranks_divide_the_parts_that_they_do_not_replicate(
    half_b: Path, overrides: list[str], bytes_per_parameter: float
) -> None:
    assert sum(training_parts(topology(half_b, *overrides)).values()) == bytes_per_parameter


def test_services_that_take_turns_need_room_for_the_largest_and_the_trainer_waits_in_host_memory(half_b: Path) -> None:
    gpus = [f"services.{name}.gpus=1" for name in ("policy-trainer", "reference", "rollout")]
    given = topology(half_b, "policy.dtype=bfloat16", *gpus, file="colocate.yaml")
    parts = training_parts(given)
    assert parts[Part.MASTERS] == 4
    trainer = per_process(given, elements(given))["policy-trainer-worker", 0]
    parameters = trainer / sum(parts.values())
    assert per_place(given, elements(given), visible_gpus(given)) == {
        Place(None, "0"): trainer,
        HOME: parameters * (sum(parts.values()) - parts[Part.GRADIENTS]),
    }


def test_an_evaluation_holds_weights_and_masters(half_b: Path) -> None:
    given = topology(
        half_b, "policy.dtype=bfloat16", "run.evaluate=true", "algorithm.kl=null", "services.reference=null"
    )
    assert per_place(given, elements(given), {})[HOME] / GIB == pytest.approx(3 * 0.92, abs=0.02)


def test_parameters_are_counted_in_the_indexed_files_without_a_stored_copy_of_a_tied_head(tmp_path: Path) -> None:
    embedding, head = {"model.embed_tokens.weight": [100, 8]}, {"lm_head.weight": [100, 8]}
    config = tmp_path / "config.json"
    config.write_text("{}")
    write_header(tmp_path / "part.safetensors", embedding | head)
    write_header(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": [100, 8]})
    assert parameter_count(str(tmp_path)) == 2400
    names = dict.fromkeys(embedding | head, "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert parameter_count(str(tmp_path)) == 1600
    config.write_text('{"tie_word_embeddings": true}')
    assert parameter_count(str(tmp_path)) == 800


def test_a_model_without_weights_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no safetensors files"):
        parameter_count(str(tmp_path))


def test_a_model_that_cannot_fit_is_refused_with_its_size(
    half_b: Path, one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "host_bytes", lambda: 24 * GIB)
    more = ("policy.dtype=bfloat16", "algorithm.kl=null", "services.reference=null")
    found = Findings()
    preflight._check_model_memory(topology(half_b, *more), "t.yaml", found)
    assert found.errors == []
    preflight._check_model_memory(topology(one_and_a_half_b, *more), "t.yaml", found)
    assert found.errors == [
        "t.yaml: policy.model: its training takes 25.9 GiB of the memory of this machine, which has 24.0 GiB (each "
        "rank of the trainer: weights 2.9 GiB, masters 5.8 GiB, gradients 5.8 GiB, optimizer 11.5 GiB); use a smaller "
        "model, or divide it (services.policy-trainer.gpus, placement.hosts)"
    ]


def test_a_gpu_that_is_too_small_is_reported(one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: {"0": 80 * GIB, "1": 16 * GIB})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    gpus = ["services.policy-trainer.gpus=1", "services.rollout.gpus=1"]
    more = ("policy.dtype=bfloat16", "algorithm.kl=null", "services.reference=null", *gpus)
    found = Findings()
    preflight._check_model_memory(topology(one_and_a_half_b, *more), "t.yaml", found)
    [line] = found.errors
    assert "25.9 GiB of the memory of GPU 1, which has 16.0 GiB" in line
