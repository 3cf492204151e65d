"""Tests how processes are named and selected, and which GPUs each of them sees."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.checks.preflight import check
from launch.processes.plan import Key, command_of, gpu_names, gpus_described, gpus_wanted, select, visible_gpus
from shared.rpc.errors import RpcError
from shared.topology import Topology, load
from shared.topology.models import DEVICE_SERVICE
from tests.unit.shared.topology.small_topology import BASE, make, problems, write


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("rollout", [("rollout", 0), ("rollout", 1)]), ("rollout/1", [("rollout", 1)]), ("monitor", [("monitor", 0)])],
)
def test_names_select_processes(name: str, chosen: list[Key]) -> None:
    assert select(name, [("rollout", 0), ("rollout", 1), ("monitor", 0)]) == chosen


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rolout", "did you mean 'rollout'"),
        ("rollout/7", "available: rollout/0"),
        ("zzz", "known: monitor, rollout"),
        ("rollout/x", "write"),
    ],
)
def test_wrong_names_are_refused_and_the_valid_names_listed(name: str, said: str) -> None:
    with pytest.raises(RpcError, match=said):
        select(name, [("rollout", 0), ("monitor", 0)])


def test_service_names_become_modules() -> None:
    assert command_of("batch-store") == ["services.batch_store"]
    assert command_of("policy-trainer-worker") == ["services.policy_trainer.worker"]
    assert command_of("critic") == ["services.policy_trainer.worker", "--model", "critic"]


REPOSITORY = Path(__file__).resolve().parents[3]
TOPOLOGIES = REPOSITORY / "launch" / "topologies"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("gpus"))
    write(folder, BASE)
    return folder


def topology(folder: Path, *overrides: str) -> Topology:
    gpus = ["services.policy-trainer.gpus=4", "services.reference.gpus=4", "services.rollout={instances: 2, gpus: 2}"]
    return load(folder / "t.yaml", [*gpus, *overrides])


def test_services_that_do_not_share_gpus_see_their_own(folder: Path) -> None:
    pieces = ["services.reference.backend=megatron", "services.reference.parallel.tp=2"]
    made = topology(folder, *pieces, *TP)
    seen = visible_gpus(made)
    assert [seen["policy-trainer-worker", rank] for rank in range(4)] == ["0", "1", "2", "3"]
    assert [seen["reference", i] for i in range(4)] == ["4", "5", "6", "7"]
    assert [seen["rollout", i] for i in range(2)] == ["8,9", "10,11"]
    assert seen["policy-trainer", 0] == seen["scheduler", 0] == ""
    assert gpus_wanted(made) == 12


def test_colocated_services_see_the_same_gpus_and_engines_divide_them(folder: Path) -> None:
    made = topology(folder, "placement.colocate=[policy-trainer, reference, rollout]", "staleness=0", *TP)
    seen = visible_gpus(made)
    assert [seen["policy-trainer-worker", rank] for rank in range(4)] == ["0", "1", "2", "3"]
    assert [seen["reference", i] for i in range(4)] == ["0", "1", "2", "3"]
    assert [seen["rollout", i] for i in range(2)] == ["0,1", "2,3"]
    assert gpus_wanted(made) == 4
    assert gpus_described(made) == "policy-trainer 4, reference 4 (the same), rollout 4 (the same)"


def test_only_gpus_that_the_launcher_sees_are_handed_out(folder: Path) -> None:
    made = topology(folder, "placement.colocate=[policy-trainer, reference]", *TP)
    seen = visible_gpus(made, gpu_names("7,6,5,4,3,2,1,0"))
    assert seen["policy-trainer-worker", 3] == "4"
    assert seen["reference", 1] == "6"
    assert [seen["rollout", i] for i in range(2)] == ["3,2", "1,0"]
    with pytest.raises(ValueError, match="rollout: GPUs 4 to 7 of 6"):
        visible_gpus(made, gpu_names("0,1,2,3,4,5"))


def test_a_run_on_the_cpu_sees_no_gpu_whatever_the_machine_has(folder: Path) -> None:
    made = load(folder / "t.yaml")
    assert set(visible_gpus(made, ["0"]).values()) == {""}
    assert gpus_wanted(made) == 0


def test_ranks_on_two_hosts_see_the_gpus_of_their_own_host(folder: Path) -> None:
    places = ["placement.hosts={a: {gpus: 8}, b: {gpus: 8}}", "transport.listen=10.0.0.1"]
    made = topology(folder, *places, "services.policy-trainer.host=[a, b]", "services.reference.host=b", *TP)
    seen = visible_gpus(made, gpu_names("7,6,5,4,3,2"))
    assert [seen["policy-trainer-worker", rank] for rank in range(4)] == ["7", "6", "0", "1"]
    assert [seen["reference", i] for i in range(4)] == ["2", "3", "4", "5"]
    assert [seen["rollout", i] for i in range(2)] == ["5,4", "3,2"]
    assert gpus_wanted(made) == 6


def test_the_large_example_is_planned_on_two_hosts_with_eight_gpus_each(folder: Path) -> None:
    text = (REPOSITORY / "launch" / "topologies" / "qwen7b-math.yaml").read_text()
    for old in ("/data/math.jsonl", "/data/math500.jsonl", "/data/aime24.jsonl"):
        text = text.replace(old, str(folder / "rows.jsonl"))
    text = text.replace("Qwen/Qwen2.5-7B-Instruct", "./model").replace(
        "max_prompt_tokens: 1024", "max_prompt_tokens: 16"
    )
    text = text.replace("max_new_tokens: 4096", "max_new_tokens: 32")
    (folder / "large.yaml").write_text(text)
    made = load(folder / "large.yaml")
    seen = visible_gpus(made)
    assert [seen["policy-trainer-worker", rank] for rank in range(8)] == list("01234567")
    assert [seen["reference", i] for i in range(8)] == list("01234567")
    assert [seen["rollout", i] for i in range(4)] == ["0,1", "2,3", "4,5", "6,7"]  # These are the second host's GPUs.
    assert gpus_wanted(made) == 8


@given(
    trainer=st.integers(0, 4),
    reference=st.integers(0, 4),
    rollout=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    colocate=st.sets(st.sampled_from(["policy-trainer", "reference", "rollout"])),
)
def test_only_processes_that_take_turns_share_a_gpu(
    folder: Path, trainer: int, reference: int, rollout: tuple[int, int], colocate: set[str]
) -> None:
    gpus, instances = rollout
    if len({trainer, reference, gpus * instances}) > 1:  # Services that share GPUs use the same number of them.
        colocate = set()
    made = _placed(folder, trainer, reference, rollout, colocate)
    seen = {key: text.split(",") for key, text in visible_gpus(made, list("abcdefghijklmnopq")).items() if text}
    sharing = {DEVICE_SERVICE[name] for name in colocate}
    for key, mine in seen.items():
        for other, theirs in seen.items():
            if key != other and not ({key[0], other[0]} <= sharing and key[0] != other[0]):
                assert not set(mine) & set(theirs), (key, other)
    assert len({name for mine in seen.values() for name in mine}) == gpus_wanted(made)
    assert sum(key[0] == "policy-trainer-worker" for key in seen) == trainer
    assert sum(len(mine) for key, mine in seen.items() if key[0] == "reference") == reference
    assert sum(len(mine) for key, mine in seen.items() if key[0] == "rollout") == gpus * instances


def _placed(folder: Path, trainer: int, reference: int, rollout: tuple[int, int], colocate: set[str]) -> Topology:
    """Return the topology with these GPU counts, bypassing the checks on engine capabilities."""
    made = load(folder / "t.yaml")
    services = made.services
    assert services.reference is not None
    changed = services.model_copy(
        update={
            "policy_trainer": services.policy_trainer.model_copy(update={"gpus": trainer}),
            "reference": services.reference.model_copy(update={"gpus": reference}),
            "rollout": services.rollout.model_copy(update={"gpus": rollout[0], "instances": rollout[1]}),
        }
    )
    placement = made.placement.model_copy(update={"colocate": tuple(sorted(colocate))})
    return made.model_copy(update={"services": changed, "placement": placement})


@pytest.mark.parametrize(
    ("visible", "names"),
    [("", []), ("-1", []), ("1,0", ["1", "0"]), ("0,-1,1", ["0"]), ("GPU-8a, MIG-b", ["GPU-8a", "MIG-b"])],
)
def test_only_gpus_that_cuda_makes_visible_are_used(visible: str, names: list[str], tmp_path: Path) -> None:
    assert gpu_names(visible, tmp_path) == names


def test_without_a_selection_all_gpus_of_the_driver_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_names(None, tmp_path) == ["0", "1"]


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ("{gpus: 2}", "2 for each instance, but an engine uses 1; use that many, and more instances"),
        ("{gpus: 4, engine: vllm, parallel: {tp: 2}}", "but an engine uses 2 (parallel.tp); use that many"),
        ("{gpus: 1, engine: openai, engine_args: {base_url: 'http://h'}}", "has its own GPUs; leave it out"),
    ],
)
def test_more_gpus_than_an_engine_can_use_are_refused(folder: Path, rollout: str, told: str) -> None:
    [line] = problems(folder / "t.yaml", f"services.rollout={rollout}")
    assert "services.rollout.gpus: " in line
    assert told in line


VLLM = "services.rollout.engine=vllm"
TP = (VLLM, "services.rollout.parallel.tp=2")


def qwen7b(folder: Path) -> Path:
    """Make a model directory with the configuration and shapes of Qwen2.5-7B; its weights file is sparse and holds no
    data.
    """
    shutil.copytree(TOPOLOGIES / "models" / "tiny-qwen3", folder)
    hidden, inner, layers, keys, vocabulary = 3584, 18944, 28, 512, 152_064
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32_768}
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **heads}))
    shapes = {"model.embed_tokens": [vocabulary, hidden], "lm_head": [vocabulary, hidden], "model.norm": [hidden]}
    for layer in (f"model.layers.{i}." for i in range(layers)):
        shapes |= {f"{layer}self_attn.{name}_proj": [hidden, hidden] for name in "qo"}
        shapes |= {f"{layer}self_attn.{name}_proj": [keys, hidden] for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj": [inner, hidden] for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj": [hidden, inner], f"{layer}input_layernorm": [hidden]}
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_the_7b_example_for_one_machine_fails_only_the_machine_checks(tmp_path: Path) -> None:
    model = qwen7b(tmp_path / "model")
    made = load(TOPOLOGIES / "qwen7b.yaml", [f"policy.model={model}"])
    seen = visible_gpus(made)
    assert [seen["policy-trainer-worker", rank] for rank in range(4)] == list("0123")
    assert [seen["rollout", i] for i in range(4)] == list("4567")
    lacking = [line.split(": ")[1] for line in check(made, "qwen7b.yaml").errors]
    machine = {"services.*.gpus", "services.batch-store.memory", "services.rollout.engine", "policy.model"}
    assert set(lacking) <= machine
