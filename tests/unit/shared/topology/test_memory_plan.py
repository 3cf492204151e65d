"""Tests how much memory a model takes up on hosts and GPUs, and that a model that cannot fit is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launch.checks import preflight
from launch.checks.findings import Findings
from launch.commands.console import show_plan
from launch.processes.plan import visible_gpus
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from shared.model.adapter import AdapterStart
from shared.ranks.layout import Layout
from shared.topology import Topology, load
from shared.topology.capacity import Parameters, parameter_counts
from shared.topology.lora import Lora
from shared.topology.memory_plan import (
    MemoryPlace,
    Phase,
    TrainingPart,
    by_place,
    engine_bytes,
    gpus_that_fit,
    keeps_whole_gradients,
    memory_lines,
    peak,
    per_process,
    rank_bytes,
    saved_bytes,
    training_parts,
    uses,
)
from shared.topology.model_files import named_shapes, parameter_count
from shared.topology.passes import FASTEST
from tests.unit.policy_trainer.test_host_waits import gradient
from tests.unit.policy_trainer.training import adamw
from tests.unit.tiny_models import make_model

TOPOLOGIES = Path(__file__).resolve().parents[4] / "launch" / "topologies"
DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "gpus.md"
GIB = 1 << 30
HOME = MemoryPlace(None, "")


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


def most(given: Topology, phase: Phase) -> dict[MemoryPlace, int]:
    """Return the memory that the run needs in each place in `phase`."""
    places = by_place(uses(given, parameter_counts(given), visible_gpus(given)))
    return {place: peak(held, frozenset({phase})).nbytes for place, held in places.items()}


@pytest.fixture(scope="module")
def half_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2(tmp_path_factory.mktemp("memory") / "0.5b", 896, 4864, 24, 2)


@pytest.fixture(scope="module")
def one_and_a_half_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2(tmp_path_factory.mktemp("memory") / "1.5b", 1536, 8960, 28, 2)


def test_a_model_in_training_takes_18_bytes_per_parameter_in_bfloat16(half_b: Path, one_and_a_half_b: Path) -> None:
    for model, gib in ((half_b, 8.28), (one_and_a_half_b, 25.87)):
        given = topology(model, "policy.dtype=bfloat16", "algorithm.kl=null", "services.reference=null")
        assert per_process(given, parameter_counts(given))["policy-trainer-worker", 0] / GIB == pytest.approx(
            gib, abs=0.02
        )
        assert most(given, Phase.STEPS) == {
            HOME: per_process(given, parameter_counts(given))["policy-trainer-worker", 0]
        }


def test_the_calculated_parts_of_one_rank_equal_those_that_the_backend_holds(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for dtype in ("float32", "bfloat16"):
        made = make_model("qwen3", head_dim=16).to(getattr(__import__("torch"), dtype))
        made.save_pretrained(model)
        options = BackendOptions(max_tokens=64, threads=1, device="cpu", scratch=tmp_path / "offloaded", passes=FASTEST)
        backend = TorchBackend(model, dtype, options, Layout(1).place(0))
        loaded = sum(each.nbytes for each in [*backend.model.parameters(), *backend._trained.own_masters()])
        scores = load(TOPOLOGIES / "quickstart.yaml", [f"policy.dtype={dtype}", "run.evaluate=true"])
        assert loaded == backend.parameters * sum(training_parts(scores.policy_model, evaluate=True).values())
        gradient(backend)
        gradients = sum(each.grad.nbytes for each in backend._trained.masters.values() if each.grad is not None)
        backend.step(1, adamw())
        held = sum(each.nbytes for each in backend.model.parameters())
        held += sum(each.nbytes for each in backend._trained.own_masters())
        held += sum(
            each.nbytes for state in backend._optimizer.state.values() for each in state.values() if each.numel() > 1
        )
        parts = training_parts(load(TOPOLOGIES / "quickstart.yaml", [f"policy.dtype={dtype}"]).policy_model)
        assert held + gradients == pytest.approx(backend.parameters * sum(parts.values()))


def test_whole_gradients_are_kept_only_where_they_and_the_pieces_fit_half_of_the_memory() -> None:
    for elements, ranks, memory_bytes, keeps in (
        (7_600_000_000, 4, 80 * GIB, False),
        (7_600_000_000, 4, 140 * GIB, True),
        (3_000_000_000, 4, 80 * GIB, True),
        (1000, 2, 2 * 12_000, True),
        (1000, 2, 2 * 12_000 - 1, False),
    ):
        assert keeps_whole_gradients(elements, ranks, memory_bytes) == keeps


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
    assert sum(training_parts(topology(half_b, *overrides).policy_model).values()) == bytes_per_parameter


def test_expert_parallel_ranks_divide_the_weights_and_gradients_of_experts(tmp_path: Path) -> None:
    made = make_model("mixtral", num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    made.save_pretrained(tmp_path / "mixture")
    (tmp_path / "mixture" / "tokenizer.json").write_text("{}")
    experts = sum(each.numel() for name, each in made.named_parameters() if ".experts." in name)
    others = sum(each.numel() for each in made.parameters()) - experts
    ranks = "services.policy-trainer={backend: megatron, workers: 4, parallel: {ep: 2}}"
    given = topology(tmp_path / "mixture", ranks)
    counts = parameter_counts(given)["policy"]
    assert counts._replace(layer=0) == Parameters(others + experts, experts=experts)
    parts = rank_bytes(given.policy_model, counts)
    assert parts[TrainingPart.WEIGHTS] == parts[TrainingPart.GRADIENTS] == 4 * (others + experts // 2)
    assert parts[TrainingPart.OPTIMIZER] == 8 * (others + experts) / 4


def test_services_that_take_turns_need_room_for_the_largest_and_the_trainer_waits_in_host_memory(half_b: Path) -> None:
    gpus = [f"services.{name}.gpus=1" for name in ("policy-trainer", "reference", "rollout")]
    given = topology(half_b, "policy.dtype=bfloat16", *gpus, file="colocate.yaml")
    parts = training_parts(given.policy_model)
    assert parts[TrainingPart.MASTERS] == 4
    trainer = per_process(given, parameter_counts(given))["policy-trainer-worker", 0]
    parameters = trainer / sum(parts.values())
    waiting = parameters * (sum(parts.values()) - parts[TrainingPart.GRADIENTS])
    published = 2 * parameters
    assert most(given, Phase.STEPS) == {MemoryPlace(None, "0"): trainer, HOME: waiting + published}
    assert most(given, Phase.CHECKPOINTS)[HOME] == waiting + published + (2 + 4 + 8) * parameters


def test_an_evaluation_holds_weights_and_masters(half_b: Path) -> None:
    given = topology(
        half_b, "policy.dtype=bfloat16", "run.evaluate=true", "algorithm.kl=null", "services.reference=null"
    )
    for phase in (Phase.STEPS, Phase.CHECKPOINTS):
        assert most(given, phase)[HOME] / GIB == pytest.approx(3 * 0.92, abs=0.02)


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


def test_a_value_head_takes_the_place_of_the_output_layer_and_a_tied_embedding_stays(tmp_path: Path) -> None:
    embedding, head = {"model.embed_tokens.weight": [100, 8]}, {"lm_head.weight": [100, 8]}
    config = tmp_path / "config.json"
    config.write_text("{}")
    for stored in (embedding | head, embedding, embedding | {"score.weight": [1, 8], "score.bias": [1]}):
        write_header(tmp_path / "model.safetensors", stored)
        assert parameter_count(str(tmp_path), "value") == 800 + 8
    config.write_text('{"tie_word_embeddings": true, "hidden_size": 8}')
    write_header(tmp_path / "model.safetensors", embedding | head)
    assert parameter_count(str(tmp_path), "value") == 800 + 8
    write_header(tmp_path / "model.safetensors", {"gpt_neox.embed_in.weight": [100, 8], "embed_out.weight": [100, 8]})
    assert named_shapes(str(tmp_path), "value") == {"gpt_neox.embed_in.weight": [100, 8], "score.weight": [1, 8]}
    write_header(tmp_path / "model.safetensors", {"tok_embeddings.weight": [100, 8], "output.weight": [100, 8]})
    assert named_shapes(str(tmp_path), "value") == {"tok_embeddings.weight": [100, 8], "score.weight": [1, 8]}


def test_a_critic_of_another_size_is_planned_with_its_own_number_of_parameters(
    half_b: Path, one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = (f"critic={{model: {half_b}, dtype: float32, optimizer: {{lr: 1.0e-3}}}}", "algorithm.advantage.name=gae")
    given = on_gpus(one_and_a_half_b, "services.policy-trainer.gpus=1", "policy.passes={}", "critic.passes={}", *critic)
    counts = parameter_counts(given)
    assert counts == {
        "policy": Parameters(parameter_count(str(one_and_a_half_b)), layer=46_797_824),
        # these models' output layers are tied
        "critic": Parameters(parameter_count(str(half_b)) + 896, layer=14_912_384),
    }
    held = per_process(given, counts)
    assert held["policy-trainer-worker", 0] == 18 * counts["policy"].trained
    assert held["critic", 0] == 16 * counts["critic"].trained
    every = {(use.key[0], use.what): use for use in uses(given, counts, visible_gpus(given), 1000)}
    assert ("policy-trainer-worker", "logits") in every
    assert not {("critic", "logits"), ("critic", "publishing")} & every.keys()
    assert every["critic", "saving"].nbytes == 12 * counts["critic"].trained
    assert every["critic", "weights"].place.gpu == "1"
    monkeypatch.setattr(preflight, "host_bytes", lambda: 1000 * GIB)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: {"0": 80 * GIB, "1": 6 * GIB, "2": 80 * GIB})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    [line] = refusals(given)
    assert line.startswith("t.yaml: critic.model: its training takes 7.4 GiB of the memory of GPU 1, which has 6.0 GiB")
    assert line.endswith("; services.critic.gpus: 2 would fit")


def test_a_model_without_weights_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no safetensors files"):
        parameter_count(str(tmp_path))


def test_a_model_that_cannot_fit_is_refused_with_its_size(
    half_b: Path, one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "host_bytes", lambda: 24 * GIB)
    more = ("policy.dtype=bfloat16", "algorithm.kl=null", "services.reference=null")
    found = Findings("t.yaml")
    preflight._check_model_memory(topology(half_b, *more), found)
    assert found.errors == []
    preflight._check_model_memory(topology(one_and_a_half_b, *more), found)
    assert found.errors == [
        "t.yaml: policy.model: its training takes 25.9 GiB of the memory of this machine, which has 24.0 GiB "
        "(policy-trainer-worker/0: weights 2.9 GiB, masters 5.8 GiB, gradients 5.8 GiB, optimizer 11.5 GiB), and 40.3 "
        "GiB while it saves a checkpoint; 16.3 GiB more would fit; use a smaller model, or a machine with more memory; "
        "policy.lora: {rank: 32} would fit"
    ]


def test_a_model_of_which_only_a_checkpoint_does_not_fit_is_refused(
    one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "host_bytes", lambda: 32 * GIB)
    more = ("policy.dtype=bfloat16", "algorithm.kl=null", "services.reference=null")
    [line] = refusals(topology(one_and_a_half_b, *more))
    assert "its checkpoints take 40.3 GiB of the memory of this machine, which has 32.0 GiB" in line
    assert "saving 20.1 GiB" in line
    assert "; 8.3 GiB more would fit; " in line


def refusals(given: Topology) -> list[str]:
    found = Findings("t.yaml")
    preflight._check_model_memory(given, found)
    return found.errors


def on_gpus(model: Path, *overrides: str) -> Topology:
    more = ("policy.dtype=bfloat16", "algorithm.kl=null", "services.reference=null", "services.rollout.gpus=1")
    return topology(model, *more, *overrides)


def test_a_gpu_that_is_too_small_is_reported_with_the_number_of_gpus_that_would_fit(
    one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "host_bytes", lambda: 1000 * GIB)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: {"0": 80 * GIB, "1": 16 * GIB})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    [line] = refusals(on_gpus(one_and_a_half_b, "services.policy-trainer.gpus=1"))
    assert "25.9 GiB of the memory of GPU 1, which has 16.0 GiB" in line
    assert line.endswith("; services.policy-trainer.gpus: 2 would fit; policy.lora: {rank: 32} would fit")
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: {"0": 16 * GIB, "1": 16 * GIB, "2": 16 * GIB})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert refusals(on_gpus(one_and_a_half_b, "services.policy-trainer.gpus=2")) == []


def test_the_smallest_number_of_gpus_is_a_multiple_of_a_copys_ranks(one_and_a_half_b: Path) -> None:
    megatron = "services.policy-trainer={backend: megatron, gpus: 2, parallel: {tp: 2}}"
    given = on_gpus(one_and_a_half_b, megatron)
    each, model = parameter_count(given.policy.model), given.policy_model
    assert gpus_that_fit(model, Parameters(each), math.ceil(each * (1 + 2 + 12 / 4)) + 4) == 4
    assert gpus_that_fit(model, Parameters(each), each * 3) is None  # tp alone divides weights and gradients


def test_an_engine_whose_weights_exceed_vllms_share_of_a_gpu_is_refused_with_the_ranks_that_would_fit(
    one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "host_bytes", lambda: 1000 * GIB)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: {"0": 48 * GIB, "1": 48 * GIB})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    engine = ("services.policy-trainer.gpus=1", "services.rollout.engine=vllm")
    assert refusals(on_gpus(one_and_a_half_b, *engine)) == []
    small = "services.rollout.engine_args={gpu_memory_utilization: 0.03}"
    [line] = refusals(on_gpus(one_and_a_half_b, *engine, small))
    assert "the engine's weights take 2.9 GiB of GPU 1, of whose 48.0 GiB vLLM uses 3%" in line
    assert line.endswith("parallel.tp of at least 2 would fit")


def test_the_copies_of_a_run_on_gpus_are_planned_where_they_are(half_b: Path) -> None:
    given = on_gpus(half_b, "services.policy-trainer.gpus=2", "services.rollout.engine=vllm")
    counts = parameter_counts(given)
    parameters = counts["policy"].trained
    found = {(use.key, use.place.gpu, use.what): use.nbytes for use in uses(given, counts, visible_gpus(given))}
    first = ("policy-trainer-worker", 0)
    assert {what: nbytes for (key, gpu, what), nbytes in found.items() if key == first and not gpu} == {
        "loading": 2 * parameters,
        "publishing": 2 * parameters,
        "saving": 14 * parameters,
    }
    assert {key: what for key, gpu, what in found if not gpu and key != first} == {("rollout", 0): "loading"}
    assert {gpu for key, gpu, _ in found if key[0] == "policy-trainer-worker" and gpu} == {"0", "1"}


def test_the_copy_for_a_checkpoint_is_as_large_as_the_plan_says(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        make_model("qwen3", head_dim=16).to(getattr(__import__("torch"), dtype)).save_pretrained(tmp_path)
        options = BackendOptions(max_tokens=64, threads=1, device="cpu", scratch=tmp_path / "offloaded", passes=FASTEST)
        backend = TorchBackend(tmp_path, dtype, options, Layout(1).place(0))
        gradient(backend)
        backend.step(1, adamw())
        state = backend.state()
        held = [each for each in (*state.weights.values(), *state.optimizer.values()) if each.numel() > 1]
        given = load(TOPOLOGIES / "quickstart.yaml", [f"policy.dtype={dtype}"])
        assert sum(each.nbytes for each in held) == backend.parameters * saved_bytes(given.policy_model)


def test_the_table_has_a_row_for_every_device_of_every_host(half_b: Path) -> None:
    hosts = ["placement.hosts={a: {gpus: 1}, b: {gpus: 1}}", "transport.listen=10.0.0.1"]
    where = ["services.policy-trainer.host=a", "services.rollout.host=b", "services.policy-trainer.gpus=1"]
    given = on_gpus(half_b, "services.rollout.engine=vllm", *hosts, *where)
    places = by_place(uses(given, parameter_counts(given), visible_gpus(given)))
    lines = memory_lines(given, places, {MemoryPlace("a", ""): 64 * GIB})
    rows = [line.split("  ")[0].strip() for line in lines]
    assert [row for row in rows if row] == ["memory of", "this machine", "host b", "GPU 0", "GPU 0 of host b"]
    text = "\n".join(lines)
    assert "64.0 GiB" in next(line for line in lines if line.startswith("this machine"))
    assert "loading 942.3 MiB (start), publishing 942.3 MiB (steps, checkpoints), saving 6.4 GiB (checkpoints)" in text
    assert text.count("batch-store/") == 2
    assert "up to 64.0 GiB of shards, not included" in text
    assert lines[-1].endswith("vLLM takes 92% of the GPU for weights and cache (gpu_memory_utilization)")


def test_a_dry_run_shows_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show_plan(load(TOPOLOGIES / "quickstart.yaml"), tmp_path, {})
    shown = capsys.readouterr().out
    assert "\nmemory of" in shown
    assert "\nthis machine  21.3 MiB" in shown


COLUMNS = ("weights", "masters", "gradients", "optimizer")


@pytest.mark.parametrize(("ranks", "megatron"), [(1, None), (4, None), (1, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_documented_formula_gives_the_planned_bytes(
    half_b: Path, dtype: str, ranks: int, megatron: int | None
) -> None:
    backend = f"backend: {'megatron' if megatron else 'torch'}, gpus: {ranks}, parallel: {{tp: {megatron or 1}}}"
    given = on_gpus(half_b, f"policy.dtype={dtype}", f"services.policy-trainer={{{backend}}}")
    if megatron:
        name = "n, backend megatron, 16 bits" if dtype == "bfloat16" else "n, backend megatron, float32"
    elif ranks > 1:
        name = "n, backend torch"
    else:
        name = "one, bfloat16 or float16" if dtype == "bfloat16" else "one, float32"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCUMENT.read_text().splitlines()]
    cells = next(row[1:] for row in rows if row and row[0] == name)
    found = {}
    for column, cell in zip(COLUMNS, cells, strict=True):
        above, _, below = cell.partition("/")
        factors = {"": 1, "n": ranks, "(tp·pp)": megatron or 1}
        found[column] = int(above) / factors[below]
    parts = {str(part): share for part, share in training_parts(given.policy_model).items()}
    assert found == {column: parts.get(column, 0) for column in COLUMNS}
    saved = next(row for row in rows if row and row[0] == "saving")
    assert saved[1] == ("weights, masters and moments: 14 with 16 bits, 12 with float32")
    assert saved_bytes(given.policy_model) == (14 if dtype == "bfloat16" else 12)


RANK_32 = ("policy.dtype=bfloat16", "policy.lora={rank: 32}", "services.reference=null")


def test_a_1_5b_adapter_of_rank_32_is_planned_within_24_gib(
    one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = topology(one_and_a_half_b, *RANK_32)
    counts = parameter_counts(given)
    assert counts == {"policy": Parameters(36_929_536, parameter_count(str(one_and_a_half_b)), layer=46_797_824)}
    parts = rank_bytes(given.policy_model, counts["policy"])
    assert sum(parts.values()) - parts[TrainingPart.BASE] == 18 * counts["policy"].trained
    assert {use.key[0] for use in uses(given, counts, {})} == {"policy-trainer-worker", "rollout"}
    assert per_process(given, counts)["rollout", 0] == 2 * sum(counts["policy"][:2])
    assert most(given, Phase.CHECKPOINTS)[HOME] / GIB == pytest.approx(6.78, abs=0.01)
    monkeypatch.setattr(preflight, "host_bytes", lambda: 24 * GIB)
    assert refusals(given) == []
    [line] = refusals(topology(one_and_a_half_b, "policy.dtype=bfloat16"))
    assert line.endswith("; use a smaller model, or a machine with more memory; policy.lora: {rank: 32} would fit")
    monkeypatch.setattr(preflight, "host_bytes", lambda: 6 * GIB)
    [line] = refusals(topology(one_and_a_half_b, "policy.dtype=bfloat16"))
    assert not line.endswith("policy.lora: {rank: 32} would fit")
    [line] = refusals(given)
    assert "base 2.9 GiB, weights 70.4 MiB, masters 140.9 MiB, gradients 140.9 MiB, optimizer 281.8 MiB" in line


def test_megatron_is_not_advised_to_train_an_adapter(one_and_a_half_b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "host_bytes", lambda: 24 * GIB)
    [line] = refusals(topology(one_and_a_half_b, "services.policy-trainer.backend=megatron", "policy.dtype=bfloat16"))
    assert line.endswith("or a machine with more memory")


def test_ranks_divide_the_base_and_the_state_of_its_adapter(one_and_a_half_b: Path) -> None:
    given = topology(one_and_a_half_b, *RANK_32, "services.policy-trainer.workers=2")
    counts = parameter_counts(given)["policy"]
    parts = rank_bytes(given.policy_model, counts)
    assert parts[TrainingPart.BASE] == counts.base
    assert sum(parts.values()) == counts.base + 8 * counts.trained


def test_vllm_has_slots_for_the_versions_of_an_adapter_padded_to_a_rank_that_it_supports(half_b: Path) -> None:
    engine = ("services.rollout.engine=vllm", "services.reference=null", "policy.dtype=bfloat16")
    for rank, padded in ((8, 8), (9, 16), (65, 128)):
        given = topology(half_b, *engine, f"policy.lora={{rank: {rank}}}")
        counts = parameter_counts(given)["policy"]
        assert engine_bytes(given, counts) == 2 * (counts.base + 3 * counts.trained * padded // rank)


def test_an_embedded_engine_that_copies_versions_of_adapters_holds_several(half_b: Path) -> None:
    none = ("services.reference=null", "policy.dtype=bfloat16", *RANK_32)
    for settings, versions in (
        ((), 1),
        (("run.deterministic=true",), 3),
        (("services.rollout.gpus=1",), 3),
        (("services.rollout.gpus=1", "services.rollout.in_flight=keep"), 1),
    ):
        given = topology(half_b, *none, *settings)
        counts = parameter_counts(given)["policy"]
        assert engine_bytes(given, counts) == 2 * (counts.base + versions * counts.trained)


def test_the_calculated_parts_of_an_adapters_rank_equal_those_that_the_backend_holds(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        make_model("qwen3", head_dim=16).to(getattr(__import__("torch"), dtype)).save_pretrained(tmp_path)
        start = AdapterStart(Lora(rank=4), 0)
        options = BackendOptions(
            max_tokens=64, threads=1, device="cpu", scratch=tmp_path / "offloaded", passes=FASTEST, adapter=start
        )
        backend = TorchBackend(tmp_path, dtype, options, Layout(1).place(0))
        gradient(backend)
        gradients = sum(each.grad.nbytes for each in backend._trained.masters.values() if each.grad is not None)
        backend.step(1, adamw())
        held = sum(each.nbytes for each in [*backend.model.parameters(), *backend._trained.own_masters()])
        held += sum(
            each.nbytes for state in backend._optimizer.state.values() for each in state.values() if each.numel() > 1
        )
        given = topology(tmp_path, f"policy.dtype={dtype}", "policy.lora={rank: 4}")
        counts = parameter_counts(given)["policy"]
        assert held + gradients == sum(rank_bytes(given.policy_model, counts).values())
        state = backend.state()
        saved = [each for each in (*state.weights.values(), *state.optimizer.values()) if each.numel() > 1]
        assert sum(each.nbytes for each in saved) == counts.trained * saved_bytes(given.policy_model)
