"""Each error in the topology is reported on one line that names its file and line."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from proto import codec
from proto.errors import WireError
from proto.messages import BatchMeta, StepBatch
from shared.topology import load, task_bytes, weight_bytes, worst_case_bytes
from shared.topology.capacity import weight_versions
from shared.topology.checks import MOST_LIVE_TASKS, MOST_SAMPLES
from tests.unit.shared.topology.small_topology import BASE, WEIGHTS, edited, problems, write

LISTEN = ["transport.listen=10.0.0.1"]


# ------------------------------------------------------------------------------------------ keys and types


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "  group_size: 4",
            "  group_size: 4\n  mini_batch_task: 3",
            "t.yaml:16: algorithm.mini_batch_task: unknown key, nearest valid key 'mini_batch_tasks'",
        ),
        (
            "  policy-trainer:",
            "  policy_trainer:",
            "t.yaml:22: services.policy_trainer: unknown key, nearest valid key 'policy-trainer'",
        ),
        *(
            (
                'train: {source: "jsonl:rows.jsonl", max_prompt_tokens: 32}',
                f"train: {{{train}}}",
                f"t.yaml:6: data.train{line}",
            )
            for train, line in (
                ("max_prompt_tokens: 3", ": needs either source or sources (one or more), but not both"),
                (
                    "source: builtin:addition, sources: {a: {source: builtin:addition}}",
                    ": needs either source or sources (one or more), but not both",
                ),
                (
                    "sources: {a: {source: builtin:addition, weight: 0}}",
                    ".sources.a.weight: 0: the source would never be used; leave it out, or give weights by step",
                ),
                (
                    "sources: {a: {source: builtin:addition, weight: [[5, 1.0], [5, 2.0]]}}",
                    ".sources.a.weight: the steps [5, 5] must rise, and the first must be 1; name each step once",
                ),
                (
                    "sources: {a: {source: builtin:addition, weight: [[1, 1.0], [5, 0.0]]}}",
                    ": sources: no source has a weight above 0 at step 5; give one to a source",
                ),
                (
                    "sources: {a: {source: builtin:addition, chat_template: {tools: 1}}}",
                    ".sources.a.chat_template: tools: set by every call; name other variables of the template",
                ),
                (
                    "max_prompt_tokens: 32, sources: {a: {source: builtin:addition, max_prompt_tokens: 33}}",
                    ".sources.a.max_prompt_tokens: 33 is above data.train.max_prompt_tokens (32), for which room is "
                    "reserved; raise that, or use at most 32",
                ),
            )
        ),
        (
            "  dtype: bfloat16",
            "  loss: {}",
            "t.yaml:4: policy.loss: unknown key here; it belongs at algorithm.loss",
        ),
        (
            "    coef: 0.001",
            "    coef: 0.001\n    zzz: 1",
            "t.yaml:19: algorithm.kl.zzz: unknown key, valid keys here: coef, estimator, in",
        ),
        (
            "every: 5}",
            "evry: 5}",
            "t.yaml:8: data.eval.held.evry: unknown key, nearest valid key 'every'",
        ),
        (
            "    backend: torch",
            "    parallel: {dp: 2}",
            "t.yaml:23: services.policy-trainer.parallel.dp: not a key; dp is derived from gpus and "
            "the other "
            "parallel sizes; remove it",
        ),
        (
            "  temperature: 1.0",
            "  top_p: 0.9",
            "t.yaml:11: sampling.top_p: not a key: it would change the distribution that the log-probs of "
            "training samples "
            "describe; remove it",
        ),
        (
            "  group_size: 4\n",
            "",
            "t.yaml:13: algorithm.group_size: required, but missing (samples per task, 1 or more; 2 "
            "or more where samples are compared)",
        ),
        (
            "  group_size: 4",
            "  group_size: '4'",
            "t.yaml:15: algorithm.group_size: '4' is not an integer (samples per task, 1 or "
            "more; 2 or more where samples are compared)",
        ),
        (
            "steps: 3",
            "steps: true",
            "t.yaml:1: run.steps: True is not an integer (training steps, 1 or more)",
        ),
        (
            "  lr: 1e-3",
            "  lr: .inf",
            "t.yaml:20: optimizer.lr: inf is not a finite number (learning rate after warm-up; must be above 0)",
        ),
        (
            "  dtype: bfloat16",
            "  dtype: bfloat61",
            "t.yaml:4: policy.dtype: 'bfloat61' is not one of float32, bfloat16, float16, nearest 'bfloat16' "
            "(data type of the weights)",
        ),
        (
            "aggregation: token_mean",
            "clip: [0.2]",
            "t.yaml:16: algorithm.loss.clip.1: required, but missing",
        ),
        (
            "aggregation: token_mean",
            "clip: 0.2",
            "t.yaml:16: algorithm.loss.clip: 0.2 is not a list ([low, high]: the ratio is clipped to "
            "[1 - low, "
            "1 + high]; default",
        ),
        (
            "  kl:\n    coef: 0.001",
            "  kl: 3",
            "t.yaml:17: algorithm.kl: 3 is not a mapping (KL to the reference; default: none)",
        ),
        (
            "memory: 1MiB",
            "memory: 1 potato",
            "t.yaml:27: services.batch-store.memory: '1 potato' is not a size; write bytes or a "
            "number with B, kB, "
            "MB, GB, TB, KiB, MiB, GiB, TiB, such as 64GiB",
        ),
        (
            "jsonl:rows.jsonl",
            "csv:rows.csv",
            "t.yaml:6: data.train.source: 'csv:rows.csv' is not a source; write builtin:<name>, jsonl:<path>",
        ),
        (
            'reward: {function: "builtin:exact_match"}',
            "reward: {timeout_s: 1}",
            "t.yaml:9: reward: needs either function or functions (one or more), but not both",
        ),
        (
            'function: "builtin:exact_match"}',
            'functions: [{function: "a:b"}], params: {x: 1}}',
            "t.yaml:9: reward: params belong to function and have no effect with functions; write them inside the "
            "items of functions",
        ),
        (
            'function: "builtin:exact_match"}',
            "function: exact_match}",
            "t.yaml:9: reward.function: 'exact_match' does not have the required form (builtin:<name> or "
            "<module>:<function>)",
        ),
        (
            "    held: {",
            "    a/b: {",
            "t.yaml:8: data.eval.a/b: 'a/b' does not have the required form",
        ),
    ],
)
def test_wrong_key_or_type_gives_a_one_line_error_with_its_place(folder: Path, old: str, new: str, line: str) -> None:
    [found] = problems(edited(folder, old, new))
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("steps: 3", "steps: 0", "t.yaml:1: run.steps: 0 is out of range: it must be 1 or more"),
        (
            "temperature: 1.0",
            "temperature: 0",
            "t.yaml:11: sampling.temperature: 0 is out of range: it must be above 0",
        ),
        ("every: 5", "every: 0", "t.yaml:8: data.eval.held.every: 0 is out of range: it must be 1 or more"),
        (
            "tasks_per_step: 6",
            "tasks_per_step: -6",
            "t.yaml:14: algorithm.tasks_per_step: -6 is out of range",
        ),
        ("lr: 1e-3", "lr: 0.0", "t.yaml:20: optimizer.lr: 0.0 is out of range: it must be above 0"),
        ("memory: 1MiB", "memory: -1", "t.yaml:27: services.batch-store.memory: -1 is out of range"),
        ("coef: 0.001", "coef: -1", "t.yaml:18: algorithm.kl.coef: -1 is out of range: it must be 0 or more"),
        ("instances: 2", "instances: 0", "t.yaml:25: services.rollout.instances: 0 is out of range"),
    ],
)
def test_error_for_a_value_out_of_range_names_the_value_and_the_limit(
    folder: Path, old: str, new: str, line: str
) -> None:
    [found] = problems(edited(folder, old, new))
    assert found.startswith(line)


# ------------------------------------------------------------------------------ across keys, files, limits


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "  group_size: 4",
            "  group_size: 1",
            "t.yaml:15: algorithm.group_size: 1 leaves advantage grpo nothing to compare; use at least 2",
        ),
        (
            "  group_size: 4",
            "  group_size: 4\n  mini_batch_tasks: 4",
            "t.yaml:16: algorithm.mini_batch_tasks: 4 does not divide tasks_per_step (6); use a divisor",
        ),
        (
            "    instances: 2",
            "    block_tasks: 4",
            "t.yaml:25: services.rollout.block_tasks: 4 does not divide algorithm.tasks_per_step "
            "(6); use a divisor "
            "or leave it out",
        ),
        (
            "aggregation: token_mean",
            "anchor: rollout, clip: [1.5, 0.28]",
            "t.yaml:16: algorithm.loss.clip.0: 1.5 is out of range: it must be above 0 and below 1, such as 0.2",
        ),
        (
            "aggregation: token_mean",
            "anchor: rollout, clip: [0.2, -0.28]",
            "t.yaml:16: algorithm.loss.clip.1: -0.28 is out of range: it must be above 0, such as 0.2",
        ),
        (
            "aggregation: token_mean",
            "anchor: rollout, tis_cap: 2.0",
            "t.yaml:16: algorithm.loss.tis_cap: 2.0 has no effect if anchor is rollout; remove it, or set "
            "anchor to proximal",
        ),
        (
            "aggregation: token_mean",
            "name: gspo",
            "t.yaml:16: algorithm.loss.aggregation: token_mean does not fit loss gspo, which has one ratio per "
            "sequence; use "
            "seq_mean_token_mean",
        ),
        (
            "    coef: 0.001",
            "    coef: 0.001\n    estimator: k1",
            "t.yaml:19: algorithm.kl.estimator: k1 as a loss term has zero expected gradient; use k3 or k2",
        ),
        (
            "    coef: 0.001\noptimizer:\n  lr: 1e-3\nservices:\n",
            "    coef: 0\noptimizer:\n  lr: 1e-3\nservices:\n  reference: {backend: torch}\n",
            "t.yaml:22: services.reference: has no effect: algorithm.kl.coef is 0, so no reference "
            "is started; remove "
            "it (null) or set a coef above 0",
        ),
        (
            "  lr: 1e-3",
            "  lr: 1e-3\n  betas: [0.9, 1.0]",
            "t.yaml:21: optimizer.betas.1: 1.0 is out of range: it must be below 1",
        ),
        (
            "    held: {",
            "    train: {",
            "t.yaml:8: data.eval.train: 'train' is the name of the training split; use another name",
        ),
        (
            "every: 5",
            "every: 5, samples: 4",
            "t.yaml:8: data.eval.held.samples: 4 samples at temperature 0 are all the same; use 1, "
            "or a temperature "
            "above 0",
        ),
        (
            "  max_new_tokens: 8",
            "  max_new_tokens: 40",
            "t.yaml:12: sampling.max_new_tokens: 32 prompt tokens (data.train.max_prompt_tokens) and "
            "40 new exceed "
            "the model's 64 positions; lower one of them",
        ),
        (
            "    backend: torch",
            "    max_tokens_per_micro_batch: 39",
            "t.yaml:23: services.policy-trainer.max_tokens_per_micro_batch: 39 is less than one "
            "sample: 32 prompt "
            "tokens (data.train.max_prompt_tokens) and 8 new; use at least 40",
        ),
        (
            "    backend: torch",
            "    gpus: 3\n    parallel: {cp: 2}",
            "t.yaml:23: services.policy-trainer.gpus: 3 is not a multiple of tp*pp*cp = 2; use 4",
        ),
        (
            "    memory: 1MiB",
            "    memory: 1MiB\n    spill_limit: 1GiB",
            "t.yaml:28: services.batch-store.spill_limit: 1073741824 bytes have no effect without "
            "spill; remove it, "
            "or name a folder as spill",
        ),
        (
            "optimizer:",
            "checkpoint: {every: 20, keep_every: 30}\noptimizer:",
            "t.yaml:19: checkpoint.keep_every: 30 is not a multiple of every (20), so some would not "
            "exist; use a "
            "multiple",
        ),
    ],
)
def test_a_contradiction_gives_a_one_line_error_with_its_place(folder: Path, old: str, new: str, line: str) -> None:
    assert problems(edited(folder, old, new)) == [line]


def test_spilling_to_disk_needs_a_limit(folder: Path) -> None:
    path = edited(folder, "    memory: 1MiB", "    memory: 1MiB\n    spill: ./disk")
    assert problems(path) == [
        f"t.yaml:28: services.batch-store.spill: {folder}/disk has no limit; set spill_limit, such as 500GiB"
    ]


def test_unknown_host_and_unknown_colocated_service_are_reported(folder: Path) -> None:
    placement = "placement: {hosts: {betta: {gpus: 1}}, colocate: [reference, monitor]}\n"
    path = write(folder, BASE.replace("    instances: 2", "    host: beta") + placement)
    assert problems(path) == [
        "t.yaml:25: services.rollout.host: no host 'beta' in placement.hosts; use 'betta'",
        "t.yaml:28: placement.colocate.1: 'monitor' is not a service with devices; use policy-trainer, critic, "
        "reference, teacher, reward-model, rollout",
    ]


@pytest.mark.parametrize(
    ("names", "override", "line"),
    [
        (
            "[policy-trainer, rollout]",
            "staleness=1",
            "--set staleness=1: staleness: 1: a colocated rollout cannot run ahead of the trainer; set 0",
        ),
        (
            "[reference, rollout]",
            "services.rollout.in_flight=keep",
            "--set services.rollout.in_flight=keep: services.rollout.in_flight: keep: a colocated engine sleeps while "
            "the trainer computes new weights; use wait",
        ),
        (
            "[policy-trainer, rollout]",
            "services.policy-trainer.gpus=1",
            "t.yaml:24: services.rollout.gpus: rollout uses 0 GPUs, but policy-trainer, which is colocated, uses 1; "
            "use the same number",
        ),
        ("[rollout]", "run.seed=1", "t.yaml:28: placement.colocate: rollout alone shares nothing; name two services"),
        (
            "[rollout, policy-trainer, rollout]",
            "run.seed=1",
            "t.yaml:28: placement.colocate.2: rollout is named twice; remove one",
        ),
        (
            "[policy-trainer, reference]",
            "algorithm.kl.coef=0",
            "t.yaml:28: placement.colocate.1: no reference is started without algorithm.kl.coef above 0 or loss dpo or "
            "ipo; leave it out",
        ),
    ],
)
def test_impossible_colocation_gives_a_one_line_error_with_its_place(
    folder: Path, names: str, override: str, line: str
) -> None:
    path = write(folder, f"{BASE}placement: {{colocate: {names}}}\n")
    overrides = [override] if override.startswith("staleness") else [override, "staleness=0"]
    found = problems(path, *overrides)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_all_three_services_may_take_turns(folder: Path) -> None:
    path = write(folder, f"{BASE}placement: {{colocate: [policy-trainer, reference, rollout]}}\n")
    loaded = load(path, ["staleness=0"])
    assert loaded.colocated_services == {"policy-trainer-worker", "reference", "rollout"}


def test_more_gpus_than_a_host_has_are_refused_unless_services_are_colocated(folder: Path) -> None:
    placement = "placement: {hosts: {a: {gpus: 4}}"
    services = "\n  reference: {host: a, gpus: 4}\n  policy-trainer:\n    host: a\n    gpus: 4\n"
    text = BASE.replace("\n  policy-trainer:\n    backend: torch\n", services)
    shared_gpus = write(folder, f"{text}{placement}, colocate: [policy-trainer, reference]}}\n")
    assert load(shared_gpus).services.policy_trainer.dp == 4
    assert problems(write(folder, f"{text}{placement}}}\n")) == [
        "t.yaml:30: placement.hosts.a.gpus: 4 GPUs, but the services on host a use 8; move one or colocate"
    ]


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("algorithm.filter_zero_variance.max_refill=1", "algorithm.filter_zero_variance"),
        ("consume=completion", "consume"),
        ("services.rollout.engine=vllm", "services.rollout.engine"),
        ("services.policy-trainer.backend=megatron", "services.policy-trainer.backend"),
        ("services.policy-trainer.gpus=1", "services.policy-trainer.gpus"),
    ],
)
def test_deterministic_mode_refuses_what_depends_on_timing(folder: Path, override: str, place: str) -> None:
    [line] = problems(write(folder), "run.deterministic=true", override)
    assert line.startswith(f"--set {override}: {place}: ")
    assert "run.deterministic needs" in line


def test_missing_model_folder_is_reported(folder: Path) -> None:
    assert problems(edited(folder, "./model", "./modell")) == [
        f"t.yaml:3: policy.model: no folder {folder}/modell; relative paths start at the topology's "
        "folder; put the "
        "model there"
    ]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "has no config.json, which every model folder has; save the model with save_pretrained"),
        (
            "model.safetensors",
            "has no *.safetensors, the only supported format; save the model as safetensors",
        ),
    ],
)
def test_model_folder_without_its_files_is_reported(folder: Path, file: str, message: str) -> None:
    (folder / "model" / file).unlink()
    assert problems(write(folder)) == [f"t.yaml:3: policy.model: {folder}/model {message}"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"a": {}}'])
def test_weights_that_are_not_safetensors_are_reported(folder: Path, content: bytes) -> None:
    (folder / "model" / "model.safetensors").write_bytes(content)
    [line] = problems(write(folder))
    assert line.startswith(f"t.yaml:3: policy.model: {folder}/model/model.safetensors is not a safetensors file")


def test_missing_jsonl_file_is_reported(folder: Path) -> None:
    (folder / "rows.jsonl").unlink()
    assert problems(write(folder)) == [
        f"t.yaml:6: data.train.source: no file {folder}/rows.jsonl; relative paths start at the "
        "topology's folder; "
        "put it there"
    ]


def test_a_data_file_whose_name_is_not_utf8_is_reported(folder: Path) -> None:
    (folder / "rows.jsonl").rename(folder / os.fsdecode(b"rows-\xff.jsonl"))
    [line] = problems(edited(folder, "rows.jsonl", "rows-*.jsonl"))
    assert line.startswith(f"t.yaml:6: data.train.source: {folder}/rows-\\xff.jsonl: its name is not UTF-8; rename it")


def test_hub_name_resolves_to_its_local_snapshot(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    path = edited(folder, "./model", "Org/Some-Model")
    assert problems(path) == [
        f"t.yaml:3: policy.model: Org/Some-Model is not in the local Hugging Face cache {cache}; fetch it with: "
        "hf download Org/Some-Model"
    ]
    repository = cache / "models--Org--Some-Model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    (folder / "model").rename(repository / "snapshots" / "abc123")
    assert load(path).policy.model == str(repository / "snapshots" / "abc123")


def test_files_cannot_be_distributed_without_other_hosts(folder: Path) -> None:
    [line] = problems(write(folder), "policy.distribute=true")
    assert "policy.distribute: true has no effect without other hosts (placement.hosts)" in line


def test_worst_case_counts_live_tasks_and_weight_versions(folder: Path) -> None:
    topology = load(write(folder), ["algorithm.num_iterations=2", "monitor.samples=null"])
    per_token = 4 + 1 + 4 + 4 + 4 + 4  # The terms include reference and proximal log-probs.
    data = 4 * (40 * per_token + 6 * 8)
    # Rollout, reference and proximal log-probs are separate puts of whole pages, with 8 shards in all.
    assert data + 3 * 4096 < task_bytes(topology, 32) < data + 3 * 4500 + 8 * 200
    # At staleness 1, two steps are live, a trained one waits for its checkpoint, and each of 2 engines has a lease
    # block.
    block = topology.services.rollout.block_tasks
    held = 3 * 6 + 2 * block
    # A replayed step puts its proximal log-probs again before the previous ones are collected.
    again = 6 * 4 * 40 * 4
    rest = worst_case_bytes(topology, 32, 2 * WEIGHTS) - held * task_bytes(topology, 32) - 4 * 2 * WEIGHTS
    assert again + 6 * 4096 < rest < again + 6 * 4700
    # A step with one update takes its log-probs from the pass it trains on, and puts none.
    once = load(write(folder), ["monitor.samples=null"])
    per_token -= 4
    data = 4 * (40 * per_token + 5 * 8)
    assert data + 2 * 4096 < task_bytes(once, 32) < data + 2 * 4500 + 7 * 200
    assert worst_case_bytes(once, 32, 0) == held * task_bytes(once, 32)
    lean = load(write(folder), ["algorithm.kl=null", "staleness=0", "gc.after=commit", "monitor.samples=null"])
    data = 4 * (40 * (4 + 1 + 4 + 4) + 4 * 8)
    assert data + 4096 < task_bytes(lean, 32) < data + 4500 + 6 * 200
    block = lean.services.rollout.block_tasks
    assert worst_case_bytes(lean, 32, 0) == (6 + 2 * block) * task_bytes(lean, 32)


def test_worst_case_counts_the_shards_that_are_kept_for_the_recorder(folder: Path) -> None:
    without = load(write(folder), ["monitor.samples=null"])
    block = without.services.rollout.block_tasks
    held, waiting = 3 * 6 + 2 * block, 2 * block
    # The terms are text (16 bytes per token and 1 KiB per sample), advantages and the trainer's log-probs.
    put = 4 * (40 * 16 + 1024) + 4 * 41 * 4
    for per_step, chosen in ((6, held), (1, min(math.ceil(held / 6 + 6 * math.sqrt(held / 6)), held))):
        topology = load(write(folder), [f"monitor.samples.per_step={per_step}"])
        more = worst_case_bytes(topology, 32, 0) - worst_case_bytes(without, 32, 0)
        least = (chosen + waiting) * put + waiting * task_bytes(topology, 32)
        assert least < more < least + (chosen + waiting) * 5000


HOSTS = ("placement.hosts={b: {}, c: {}}", "transport.listen=10.0.0.1")


@pytest.mark.parametrize(
    ("versions", "overrides"),
    [
        (3, ["staleness=0", "services.rollout.instances=1"]),
        (3, ["staleness=1", "services.rollout.instances=1"]),
        (6, ["staleness=4", "services.rollout.instances=1"]),
        # These engines compute with weights that they have mapped.
        (9, ["staleness=4", "services.rollout.instances=4"]),
        (6, ["staleness=4", "services.rollout.instances=4", "services.rollout.gpus=1"]),
        (7, ["staleness=4", *HOSTS, "services.rollout={instances: 4, host: [b, c]}"]),
        (7, ["staleness=4", "run.deterministic=true"]),
        (5, ["staleness=1", "services.rollout.instances=1", "checkpoint.every=2", "algorithm.kl.refresh_every=2"]),
    ],
)
def test_room_is_required_for_the_versions_that_slow_leases_and_engines_keep_alive(
    folder: Path, versions: int, overrides: list[str]
) -> None:
    topology = load(write(folder), [*overrides, "services.batch-store.memory=8MiB"])
    assert weight_versions(topology) == versions
    needed = worst_case_bytes(topology, 32, weight_bytes(topology.policy_model))
    [line] = problems(write(folder), *overrides, f"services.batch-store.memory={needed - 1}")
    assert f" {versions} weight versions of " in line
    assert f"set at least {needed} (" in line


def test_error_for_too_little_memory_names_a_sufficient_size(folder: Path) -> None:
    topology = load(write(folder))
    weights = weight_bytes(topology.policy_model)
    assert 2 * WEIGHTS < weights < 2 * WEIGHTS + 5000
    needed = worst_case_bytes(topology, 32, weights)
    [line] = problems(write(folder), f"services.batch-store.memory={needed - 1}")
    assert line.startswith(f"--set services.batch-store.memory={needed - 1}: services.batch-store.memory: ")
    assert f"set at least {needed} (" in line
    assert load(write(folder), [f"services.batch-store.memory={needed}"]).services.batch_store.memory == needed


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["placement.engine=ray"], "placement.engine: ray has no effect without other hosts; name them in "),
        (["placement.hosts={b: {}}"], "transport.listen: none, but b must reach this machine; give its address"),
        (
            ["placement.hosts={a: {}, b: {}}", *LISTEN, "services.policy-trainer.host=[a, b]"],
            "services.policy-trainer.host: 2 hosts for 1 rank: each host must have the same number of "
            "ranks, a multiple of tp*cp*ep = 1; use 2 ranks, or fewer hosts",
        ),
        (
            [
                "placement.hosts={a: {}, b: {}}",
                *LISTEN,
                "services.policy-trainer={host: [a, b], backend: megatron, parallel: {tp: 2}}",
            ],
            "services.policy-trainer.host: 2 hosts for 2 ranks: each host must have the same number of "
            "ranks, a multiple of tp*cp*ep = 2; use 4 ranks, or fewer hosts",
        ),
        (
            [
                "placement.hosts={b: {}, c: {}}",
                *LISTEN,
                "services.reference={host: [b, c], backend: megatron, parallel: {cp: 2}}",
            ],
            "services.reference.host: 2 hosts for 2 ranks: each host must have the same number of "
            "ranks, a multiple of tp*cp*ep = 2; use 4 ranks, or fewer hosts",
        ),
        (
            ["placement.hosts={b: {}}", *LISTEN, "services.rollout.host=[b, b]"],
            "services.rollout.host: ['b', 'b']: name a host, or several different ones",
        ),
        (
            ["placement.hosts={b: {}}", *LISTEN, "services.rollout={host: b, weights: ipc, engine: vllm}"],
            "services.rollout.weights: ipc reaches rollouts on the trainer's GPUs only, not on b; use shards or nccl",
        ),
    ],
)
def test_hosts_that_cannot_run_their_services_are_refused(folder: Path, overrides: list[str], line: str) -> None:
    assert any(line in each for each in problems(write(folder), *overrides))


def test_more_live_tasks_than_a_snapshot_can_hold_are_refused(folder: Path) -> None:
    room = ("services.batch-store.memory=900GiB", "algorithm.group_size=4", "algorithm.tasks_per_step=4096")
    most = MOST_LIVE_TASKS // 4096 - 1
    load(write(folder), [*room, f"staleness={most}"])
    [line] = problems(folder / "t.yaml", *room, f"staleness={most + 1}")
    assert f"staleness: {most + 1} with 4096 tasks a step allows 102400 live tasks, but at most 100000" in line


def test_a_step_whose_scalars_exceed_the_message_size_is_refused(folder: Path) -> None:
    def batch(samples: int) -> StepBatch:
        return StepBatch(step=1, batch=BatchMeta(tasks=[]), scalars={"reward": np.zeros(samples, np.float32)})

    room = ("services.batch-store.memory=9GiB", "algorithm.group_size=4")
    load(write(folder), [*room, f"algorithm.tasks_per_step={MOST_SAMPLES // 4}"])
    codec.encode_body(batch(MOST_SAMPLES))
    [line] = problems(folder / "t.yaml", *room, f"algorithm.tasks_per_step={MOST_SAMPLES // 4 + 1}")
    assert "algorithm.tasks_per_step: 4097 tasks of 4 samples: a step has at most 16384 samples" in line
    with pytest.raises(WireError):
        codec.encode_body(batch(MOST_SAMPLES + 1))
