"""Tests the topology: derived values, overrides, the resolved file and the examples."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shared.topology import (
    TRAINER_STORE,
    ServiceSpec,
    TopologyError,
    document,
    load,
    weight_bytes,
    worst_case_bytes,
)
from tests.unit.shared.topology.small_topology import BASE, edited, problems, write

REPOSITORY = Path(__file__).resolve().parents[4]
EXAMPLES = REPOSITORY / "launch" / "topologies"


def test_defaults_are_derived_from_the_given_keys(folder: Path) -> None:
    topology = load(write(folder))
    assert topology.algorithm.mini_batch_tasks == 6
    assert topology.algorithm.updates_per_step == 1
    assert topology.algorithm.loss.anchor == "proximal"
    assert topology.algorithm.loss.tis_cap == 2.0
    assert topology.algorithm.loss.clip is None
    assert topology.services.rollout.block_tasks == 3
    assert topology.services.batch_store.memory == 1024**2
    assert topology.needs_reference
    assert topology.services.reference is not None
    assert topology.policy.model == str(folder / "model")
    assert topology.data.train.source == f"jsonl:{folder}/rows.jsonl"


@pytest.mark.parametrize(
    ("overrides", "anchor"),
    [
        (["staleness=0"], "rollout"),
        (["staleness=0", "algorithm.num_iterations=2"], "proximal"),
        (["staleness=0", "algorithm.mini_batch_tasks=3"], "proximal"),
        (["staleness=1"], "proximal"),
        (["staleness=0", "algorithm.loss.anchor=proximal"], "proximal"),
    ],
)
def test_the_anchor_is_the_rollout_only_if_one_update_follows_fresh_samples(
    folder: Path, overrides: list[str], anchor: str
) -> None:
    assert load(write(folder), overrides).algorithm.loss.anchor == anchor


@pytest.mark.parametrize("override", ["algorithm.kl=null", "algorithm.kl.coef=0"])
def test_without_kl_no_reference_is_started(folder: Path, override: str) -> None:
    topology = load(write(folder), [override])
    assert not topology.needs_reference
    assert topology.services.reference is None
    assert all(spec.service != "reference" for spec in topology.services_plan())


@pytest.mark.parametrize(
    ("tasks", "group", "instances", "block"),
    [(10, 60, 1, 5), (96, 8, 1, 48), (64, 8, 4, 16), (7, 2, 2, 1), (4, 999, 1, 1)],
)
def test_lease_is_the_largest_divisor_of_a_step_within_512_samples(
    folder: Path, tasks: int, group: int, instances: int, block: int
) -> None:
    sizes = [f"algorithm.tasks_per_step={tasks}", f"algorithm.group_size={group}"]
    topology = load(
        write(folder), [*sizes, f"services.rollout.instances={instances}", "services.batch-store.memory=1GiB"]
    )
    assert topology.services.rollout.block_tasks == block


@pytest.mark.parametrize(
    ("engine", "workflow", "block"), [("vllm", "null", 32), ("transformers", "{function: m:f}", 32)]
)
def test_a_lease_for_vllm_or_a_workflow_has_at_most_256_samples(
    folder: Path, engine: str, workflow: str, block: int
) -> None:
    sizes = ["algorithm.tasks_per_step=64", "algorithm.group_size=8", "services.batch-store.memory=1GiB"]
    chosen = [f"services.rollout.engine={engine}", f"workflow={workflow}", "services.rollout.instances=1"]
    topology = load(write(folder), [*sizes, *chosen])
    assert topology.services.rollout.block_tasks == block


@pytest.mark.parametrize(("engine", "block"), [("vllm", 64), ("transformers", 32)])
def test_an_engine_that_refills_its_batch_gets_its_share_of_a_step_in_one_lease_when_services_take_turns(
    folder: Path, engine: str, block: int
) -> None:
    sizes = ["algorithm.tasks_per_step=128", "algorithm.group_size=16", "services.batch-store.memory=4GiB"]
    turns = ["staleness=0", "placement.colocate=[policy-trainer, rollout]", f"services.rollout.engine={engine}"]
    rollout = load(write(folder), [*sizes, *turns, "services.rollout.instances=2"]).services.rollout
    assert rollout.block_tasks == block


def test_plan_starts_each_process_after_those_it_needs(folder: Path) -> None:
    assert load(write(folder)).services_plan() == [
        ServiceSpec("scheduler", 0),
        ServiceSpec("batch-store", 0),
        ServiceSpec("monitor", 0),
        ServiceSpec("recorder", 0),
        ServiceSpec("policy-trainer-worker", 0),
        ServiceSpec("policy-trainer", 0),
        ServiceSpec("reference", 0),
        ServiceSpec("rollout", 0),
        ServiceSpec("rollout", 1),
    ]


@pytest.mark.parametrize("section", ["monitor.prometheus={}", "monitor.traces={}"])
def test_an_exporter_runs_only_if_something_is_exported(folder: Path, section: str) -> None:
    assert ServiceSpec("exporter", 0) not in load(write(folder)).services_plan()
    assert ServiceSpec("exporter", 0) in load(write(folder), [section]).services_plan()


@pytest.mark.parametrize(
    ("key", "path", "text"),
    [
        (
            "monitor.prometheus.listen=0.0.0.0:9464",
            "monitor.prometheus.listen",
            "0.0.0.0:9464: others reach this address, and monitor.prometheus.token is not set",
        ),
        ("monitor.prometheus.listen=localhost", "monitor.prometheus.listen", "is not an address with a port"),
        ("monitor.prometheus.listen=localhost:0", "monitor.prometheus.listen", "has no valid port"),
        ("monitor.traces.file=false", "monitor.traces", "no span would be kept"),
        ("monitor.traces.otlp=ftp://host", "monitor.traces.otlp", "is not the address of a collector"),
        ("monitor.traces.otlp=http://u:p@host", "monitor.traces.otlp", "is not the address of a collector"),
        ("monitor.traces.file_limit=1KiB", "monitor.traces.file_limit", "must be 65536 or more"),
        ("monitor.traces.share=1.5", "monitor.traces.share", "1.5 is out of range"),
    ],
)
def test_invalid_exporter_settings_are_refused_with_a_one_line_error(
    folder: Path, key: str, path: str, text: str
) -> None:
    [line] = problems(write(folder), key)
    assert line.startswith(f"--set {key}: {path}: ")
    assert text in line


def test_an_address_that_other_hosts_can_reach_is_accepted_with_a_token(folder: Path) -> None:
    given = load(write(folder), ["monitor.prometheus={listen: '[::]:9464', token: ./token}"]).monitor
    assert given.prometheus is not None
    assert given.prometheus.token == f"{folder}/token"


def test_resolved_file_reads_back_equal_from_another_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    topology = load(write(folder), ["sampling.stop=[\"\\n\", '1e5', 'true']", "services.batch-store.directory=./shm"])
    resolved = tmp_path_factory.mktemp("run") / "topology.yaml"
    topology.dump_resolved(resolved)
    assert load(resolved) == topology
    assert resolved.read_text() == topology.to_yaml() == load(resolved).to_yaml()
    assert document.plain(resolved.read_text()) == topology.document()
    assert topology.services.batch_store.directory == f"{folder}/shm"
    assert os.listdir(resolved.parent) == ["topology.yaml"]


def test_topology_cannot_be_changed_after_loading(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(write(folder)).run.steps = 4


# ------------------------------------------------------------------------------------------ reading the file


def test_missing_topology_file_is_reported(tmp_path: Path) -> None:
    assert problems(tmp_path / "t.yaml") == ["t.yaml: cannot be read (No such file or directory)"]


def test_error_for_invalid_yaml_names_its_line(folder: Path) -> None:
    [line] = problems(edited(folder, "  lr: 1e-3", "  lr: [1e-3"))
    assert line.startswith("t.yaml:21: not YAML: ")


@pytest.mark.parametrize("text", ["", "- run", "run"])
def test_document_must_be_a_mapping(folder: Path, text: str) -> None:
    assert problems(write(folder, text)) == ["t.yaml:1: must be a mapping with the keys run, policy, data, ..."]


def test_every_duplicate_key_is_reported_with_both_lines(folder: Path) -> None:
    path = edited(folder, "  group_size: 4\n", "  group_size: 4\n  group_size: 8\n  tasks_per_step: 6\n")
    assert [line.replace(f"{folder}/", "") for line in problems(path)] == [
        "t.yaml:16: algorithm.group_size: duplicate key, first at t.yaml:15; remove one",
        "t.yaml:17: algorithm.tasks_per_step: duplicate key, first at t.yaml:14; remove one",
    ]


def test_tagged_object_is_refused_and_not_constructed(folder: Path) -> None:
    for tagged in ("!!python/object/apply:os.getpid []", "!!python/name:os.getpid x", "!own {a: 1}"):
        line = problems(edited(folder, "steps: 3", f"steps: {tagged}"))[0]
        assert line.startswith("t.yaml:1: run.steps: ")
        assert line.endswith("; write a plain value")


def test_alias_that_refers_to_itself_is_refused(folder: Path) -> None:
    lines = problems(edited(folder, "    coef: 0.001", "    coef: &loop [*loop]"))
    assert "t.yaml:18: algorithm.kl.coef.0: an alias that contains itself; write the value out" in lines


def test_aliased_value_is_read_in_both_places(folder: Path) -> None:
    text = BASE.replace("tasks_per_step: 6", "tasks_per_step: &six 6").replace("steps: 3", "steps: 3, seed: 1")
    topology = load(write(folder, text.replace("  group_size: 4", "  group_size: *six")))
    assert topology.algorithm.group_size == 6


def test_yaml_date_must_be_quoted(folder: Path) -> None:
    lines = problems(edited(folder, "name: small", "name: 2001-01-01"))
    assert lines[0] == "t.yaml:1: run.name: is a date in YAML ('2001-01-01'); quote it"


# ------------------------------------------------------------------------------------------ all at once


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    (folder / "rows.jsonl").unlink()
    text = BASE.replace("dtype: bfloat16", "dtyp: bfloat16").replace("lr: 1e-3", "lr: 1e-3\n  epss: 1")
    lines = problems(write(folder, text.replace("    backend: torch", "    host: there")), "run.stps=4")
    assert sorted(line.split(": ")[:2] for line in lines) == [
        ["--set run.stps=4", "run.stps"],
        ["t.yaml:21", "optimizer.epss"],
        ["t.yaml:24", "services.policy-trainer.host"],  # placement.hosts has no such host.
        ["t.yaml:4", "policy.dtyp"],
        ["t.yaml:6", "data.train.source"],
    ]


def test_no_error_is_reported_about_the_default_that_replaces_an_invalid_value(folder: Path) -> None:
    [line] = problems(edited(folder, "aggregation: token_mean", "anchor: roll_out, tis_cap: 3.0"))
    assert line.startswith("t.yaml:16: algorithm.loss.anchor: 'roll_out' is not one of proximal, rollout, nearest")


# ------------------------------------------------------------------------------------------ overrides


def test_overrides_apply_in_order_and_reach_into_lists(folder: Path) -> None:
    overrides = [
        "run.steps=7",
        "run.steps=9",
        "algorithm.num_iterations=2",
        "algorithm.loss.clip=[0.2, 0.2]",
        "algorithm.loss.clip.1=0.3",
        "lease.lease_s=5",
        "run.name='12'",
    ]
    topology = load(write(folder), overrides)
    assert topology.run.steps == 9
    assert topology.run.name == "12"
    assert topology.algorithm.loss.clip == (0.2, 0.3)
    assert topology.lease.lease_s == 5.0


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "run.steps=x",
            "--set run.steps=x: run.steps: 'x' is not an integer (training steps, 1 or more)",
        ),
        ("run.stepz=4", "--set run.stepz=4: run.stepz: unknown key, nearest valid key 'steps'"),
        (
            "data.eval.held={every: 3}",
            "--set data.eval.held={every: 3}: data.eval.held.source: required, but missing "
            "(builtin:<name>, jsonl:<path>, parquet:<path>, datasets:<folder>, "
            "hub:<owner>/<name>/<path> or reasoning-gym:<data set>)",
        ),
        ("run.steps", "--set run.steps: not an override; it must look like a.b=value"),
        ("run..steps=1", "--set run..steps=1: not an override; it must look like a.b=value"),
        ("run.steps.x=1", "--set run.steps.x=1: run.steps: no key 'x' below it: it holds 3"),
        (
            "algorithm.group_size=1",
            "--set algorithm.group_size=1: algorithm.group_size: 1 leaves advantage grpo nothing to "
            "compare; use at least 2",
        ),
        (
            "services.rollout={engine: openai}",
            "--set services.rollout={engine: openai}: services.rollout.engine_args: engine openai needs to know its "
            "server; set base_url, such as http://127.0.0.1:8000",
        ),
    ],
)
def test_error_for_an_override_names_the_override(folder: Path, override: str, line: str) -> None:
    assert problems(write(folder), override) == [line]


def test_override_past_the_end_of_a_list_is_refused(folder: Path) -> None:
    override = "algorithm.loss.clip.2=1"
    assert problems(write(folder), "algorithm.num_iterations=2", "algorithm.loss.clip=[0.1, 0.4]", override) == [
        f"--set {override}: algorithm.loss.clip: no item '2': the list has items 0 to 1; set the whole list"
    ]


def test_engine_arguments_without_an_engine_that_takes_them_are_refused(folder: Path) -> None:
    [line] = problems(write(folder), "services.rollout.engine_args={max_num_seqs: 4}")
    assert line.endswith("rollout.engine_args: max_num_seqs: engine transformers takes no arguments; leave it out")


def test_override_that_is_not_yaml_is_refused(folder: Path) -> None:
    [line] = problems(write(folder), "run.name=[1")
    assert line.startswith("--set run.name=[1: value is not YAML (")


# ------------------------------------------------------------------------------ options of this build


@pytest.mark.parametrize(
    ("override", "path", "use"),
    [
        ("services.rollout.parallel.pp=2", "services.rollout.parallel.pp", "1"),
        ("services.rollout.parallel.cp=2", "services.rollout.parallel.cp", "1"),
    ],
)
def test_option_without_effect_in_this_build_is_refused(folder: Path, override: str, path: str, use: str) -> None:
    [line] = problems(write(folder), override)
    assert line.startswith(f"--set {override}: {path}: not available in this version: ")
    assert line.endswith(f"; use {use}")


# ------------------------------------------------------------------------------------------ the examples


def example(name: str, folder: Path) -> Path:
    """Copy the example to a folder in which the files that it names can be created."""
    path = folder / f"{name}.yaml"
    path.write_text((EXAMPLES / f"{name}.yaml").read_text())
    return path


def test_quickstart_loads_unchanged(folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "model").rename(folder / "models" / "tiny-qwen3")
    topology = load(example("quickstart", folder))
    assert topology.algorithm.loss.anchor == "rollout"
    assert topology.algorithm.loss.tis_cap is None
    assert topology.services.rollout.block_tasks == 64
    assert topology.data.eval["heldout"].temperature == 0


def test_an_unknown_kind_of_warning_is_refused_and_the_nearest_is_suggested(folder: Path) -> None:
    [line] = problems(write(folder), "monitor.warnings.off=[truncation, reward-slwo]")
    assert line.startswith("--set monitor.warnings.off=[truncation, reward-slwo]: monitor.warnings.off: ")
    assert "'reward-slwo' is not one of" in line
    assert "nearest 'reward-slow'" in line
    assert load(folder / "t.yaml", ["monitor.warnings.off=truncation"]).monitor.warnings.off == ("truncation",)


def test_the_former_place_of_monitor_is_read_but_errors_name_the_present_one(folder: Path) -> None:
    [line] = problems(write(folder), "services.monitor.wandb.project=")
    assert line.startswith("--set services.monitor.wandb.project=: monitor.wandb.project: ")
    path = edited(folder, "services:\n", "services:\n  monitor:\n    web: {listen: 1}\n")
    [line] = problems(path)
    assert line.startswith("t.yaml:23: monitor.web.listen: 1 is not a string")


@pytest.mark.parametrize("form", ["monitor", "services.monitor"])
def test_a_key_of_monitor_can_be_set_in_a_resolved_topology(folder: Path, form: str) -> None:
    path = write(folder, BASE + "  monitor: {web: {token: ./token}}\n")
    load(path).dump_resolved(path)
    assert "monitor" not in document.plain(path.read_text())["services"]
    web = load(path, [f"{form}.web.listen=127.0.0.1:9000", f"{form}.samples=null"]).monitor.web
    assert web is not None
    assert (web.listen, web.token) == ("127.0.0.1:9000", str(folder / "token"))


def test_a_key_of_monitor_that_a_file_has_in_both_places_is_refused(folder: Path) -> None:
    [line] = problems(write(folder, BASE + "  monitor: {web: {}}\nmonitor: {web: {}}\n"))
    assert line == "t.yaml:28: services.monitor.web: given twice, also as monitor.web; remove one"


def test_qwen7b_example_is_valid_except_for_its_missing_files(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    lines = problems(example("qwen7b-math", folder))
    assert [line.split(": ")[:2] for line in lines] == [
        ["qwen7b-math.yaml:3", "policy.model"],
        ["qwen7b-math.yaml:7", "data.train.source"],
        ["qwen7b-math.yaml:9", "data.eval.math500.source"],
        ["qwen7b-math.yaml:10", "data.eval.aime24.source"],
    ]


def test_plan_of_the_qwen7b_example_has_the_derived_ranks(folder: Path) -> None:
    # The positions are those of the real model; the test's tiny model has 64.
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 32768}))
    files = [
        "data.train.source=builtin:x",
        "data.eval.math500.source=builtin:x",
        "data.eval.aime24.source=builtin:x",
    ]
    path = example("qwen7b-math", folder)
    topology = load(path, ["policy.model=./model", *files])
    assert topology.services.policy_trainer.dp == 2
    assert topology.algorithm.updates_per_step == 2
    plan = topology.services_plan()
    assert [spec.host for spec in plan if spec.service == "batch-store"] == ["a", "b"]
    # A put goes into one store, so each store must be able to hold everything that can be live.
    weights = weight_bytes(topology.policy_model)
    needed = worst_case_bytes(topology, topology.data.train.max_prompt_tokens or 0, weights)
    small = [*files, f"services.batch-store.memory={needed // 2 + 1}", "services.batch-store.spill_limit=1"]
    with pytest.raises(TopologyError, match=f"set at least {needed} "):
        load(path, ["policy.model=./model", *small])
    assert sum(spec.service == "policy-trainer-worker" for spec in plan) == 8
    assert sum(spec.service == "reference" for spec in plan) == 8
    assert [spec.name for spec in plan if spec.service == "rollout"] == [f"rollout/{i}" for i in range(4)]
    resolved = path.with_name("resolved.yaml")
    topology.dump_resolved(resolved)
    assert load(resolved) == topology


@pytest.mark.parametrize(("trainer", "rollout"), [("b", "a"), ("a", "b")])
def test_the_trainers_host_has_the_store_that_the_trainer_uses(folder: Path, trainer: str, rollout: str) -> None:
    places = ["placement.hosts={a: {}, b: {}}", f"services.policy-trainer.host={trainer}"]
    places += [f"services.rollout.host={rollout}", "transport.listen=10.0.0.1"]
    topology = load(write(folder), places)
    stores = {spec.name: spec.host for spec in topology.services_plan() if spec.service == "batch-store"}
    assert stores[TRAINER_STORE] == trainer
    assert rollout in stores.values()


@pytest.mark.parametrize(
    ("service", "settings", "hosts"),
    [
        ("policy-trainer-worker", "services.policy-trainer={host: [a, b], workers: 4}", "aabb"),
        ("policy-trainer-worker", "services.policy-trainer={host: [a, b, c], workers: 3}", "abc"),
        ("reference", "services.reference={host: [b, c], gpus: 4, backend: megatron, parallel: {tp: 2}}", "bbcc"),
        ("reference", "services.reference={host: [b, c], gpus: 6, backend: megatron, parallel: {tp: 2}}", "bbccbb"),
        ("reference", "services.reference={host: [b, c], backend: megatron, parallel: {pp: 2}}", "bc"),
        (
            "reference",
            "services.reference={host: [b, c], gpus: 4, backend: megatron, parallel: {tp: 2, pp: 2}}",
            "bbcc",
        ),
        ("reference", "services.reference={host: [b, c]}", "b"),
        ("rollout", "services.rollout={host: [b, c, a], instances: 2}", "bc"),
        ("rollout", "services.rollout={host: [b, c], instances: 3}", "bcb"),
    ],
)
def test_copies_alternate_between_hosts_and_ranks_of_one_copy_are_divided_into_blocks(
    folder: Path, service: str, settings: str, hosts: str
) -> None:
    places = "placement.hosts={a: {gpus: 8}, b: {gpus: 8}, c: {gpus: 8}}"
    home = [] if "policy-trainer" in settings else ["services.policy-trainer.host=a"]
    topology = load(write(folder), [places, *home, settings, "transport.listen=10.0.0.1"])
    assert [spec.host for spec in topology.services_plan() if spec.service == service] == list(hosts)


# ------------------------------------------------------------------------------ the cost of importing


def cpu_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_importing_the_topology_is_quick_and_does_not_import_torch() -> None:
    code = "import sys, shared.topology; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    seconds = []
    for _ in range(3):
        started = cpu_seconds()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        seconds.append(cpu_seconds() - started)
        assert done.stdout.strip() == "[]"
    # The import takes 0.2 s on an idle core. The limit is far above it, and far below the seconds that torch takes.
    assert min(seconds) < 1.0
