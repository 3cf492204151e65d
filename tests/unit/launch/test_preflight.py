"""Tests the checks of functions, tokenizers and model files before the launch. Each error is one line with a remedy."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from launch.checks import functions, preflight
from launch.processes.programs import child_environment
from shared.security.connections import most_connections
from shared.topology import load, snapshot_bytes
from shared.topology.fields import format_size
from tests.unit.shared.topology.small_topology import edited, make, problems, write

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
TOPOLOGIES = ROOT / "launch" / "topologies"
QUICKSTART = TOPOLOGIES / "quickstart.yaml"

MODULE = """\
import asyncio


def plain(sample, *, scale, shift=0.0):
    return scale


def no_parameters(sample):
    return 1.0


async def flow(row, llm, ctx):
    return llm.trajectory()


def two(rewards, groups):
    return rewards


LOADED = True
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TOPOLOGIES / "models" / "tiny-qwen3", tmp_path / "model"))


def errors(*overrides: str) -> list[str]:
    """Return the errors of the quickstart with `overrides`, without the file name."""
    found = preflight.check(load(QUICKSTART, list(overrides)), "t.yaml").errors
    assert all("\n" not in line and line.startswith("t.yaml: ") for line in found)
    return [line.removeprefix("t.yaml: ") for line in found]


def test_a_source_of_texts_with_a_system_message_or_variables_of_the_template_is_refused() -> None:
    sources = (
        "{plain: {source: 'builtin:addition'}, said: {source: 'builtin:addition', system: s}, "
        "made: {source: 'builtin:addition', chat_template: {think: true}}}"
    )
    found = errors("data.train.source=null", f"data.train.sources={sources}")
    assert [line for line in found if "prompt that is text" in line] == [
        f"data.train.sources.{name}.{key}: has no effect on a prompt that is text (builtin:addition row 0); write the "
        f"prompt as messages, or remove {key}"
        for name, key in (("said", "system"), ("made", "chat_template"))
    ]


@pytest.mark.parametrize("key", ["reward.function", "reward.functions[1].function"])
def test_an_unknown_builtin_is_reported_with_the_nearest_match(key: str) -> None:
    wrong = "{function: builtin:exact_macth}"
    given = (
        f"reward={wrong}" if key == "reward.function" else f"reward.functions=[{{function: builtin:regex}}, {wrong}]"
    )
    overrides = [given] if key == "reward.function" else ["reward.function=null", given]
    found = [line for line in errors(*overrides) if "macth" in line]
    assert found == [
        f"{key}: reward function 'builtin:exact_macth': names no builtin; use builtin:exact_match; "
        f"correct {key} or its params"
    ]


def test_user_functions_are_tried_in_a_separate_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_functions.py").write_text(MODULE + "import os; open('pid', 'w').write(str(os.getpid()))\n")
    (tmp_path / "my_broken.py").write_text("import a_module_that_is_nowhere\n")
    monkeypatch.chdir(tmp_path)
    terms = {
        "plain, params: {scale: 2.0}": "",
        "plain, params: {scale: 2.0, shift: 1.0, slope: 3}": "got an unexpected keyword argument 'slope'",
        "plain": "missing a required argument: 'scale'",
        "no_parameters, params: {scale: 1}": "got an unexpected keyword argument 'scale'",
        "nothing": "my_functions.py has no function 'nothing'",
        "LOADED": "my_functions.py has no function 'LOADED'",
    }
    named = ", ".join(f"{{function: my_functions:{term}}}" for term in terms)
    broken = "{function: my_broken:score}"
    found = errors(
        "reward.function=null",
        f"reward.functions=[{named}, {broken}]",
        "workflow={function: my_functions:plain}",
        "algorithm.advantage={name: my_functions:two}",
        "algorithm.loss={name: my_functions:none}",
    )
    expected = {f"reward.functions[{index}].function": why for index, why in enumerate(terms.values()) if why}
    expected["reward.functions[6].function"] = "No module named 'a_module_that_is_nowhere'"
    expected["workflow.function"] = "cannot be called as fn(row, llm, ctx, **params)"
    expected["algorithm.advantage.name"] = "cannot be called with 3 arguments and params []"
    expected["algorithm.loss.name"] = "my_functions.py has no function 'none'"
    assert [line.partition(": ")[0] for line in found] == list(expected)
    for line, why in zip(found, expected.values(), strict=True):
        assert why in line
        assert "; correct " in line
    assert "my_functions" not in sys.modules
    assert int((tmp_path / "pid").read_text()) != os.getpid()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import time\ntime.sleep(600)\n", "its module is still being imported after 3 s"),
        ("import os\nos._exit(0)\n", "its module ends the process that imports it"),
    ],
)
def test_a_module_that_hangs_or_dies_is_reported_and_leaves_no_process(
    body: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    fork = f"import os, subprocess\nopen({str(pids)!r}, 'a').write(str(os.getpid()) + ' ')\n"
    (tmp_path / "my_bad.py").write_text(fork + body)
    (tmp_path / "my_good.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(functions, "LIMIT_S", 3.0 if "sleep" in body else 60.0)
    found = errors("workflow={function: my_good:flow}", "reward.function=my_bad:score")
    assert found == [f"reward.function: 'my_bad:score': {why}; correct reward.function or its params"]
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_builtins_without_a_library_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert errors("reward.function=builtin:numeric", "reward.params={tolerance: 0.1}") == []
    [line] = errors("reward.function=builtin:numeric", "reward.params={tolerence: 0.1}")
    assert "got an unexpected keyword argument 'tolerence'" in line


def test_an_invalid_pattern_is_reported() -> None:
    [line] = errors("reward={function: builtin:regex, params: {pattern: '('}}")
    assert line.startswith("reward.function: reward function 'builtin:regex': params {'pattern': '('} cannot work (")
    assert errors("reward={function: builtin:regex, params: {pattern: 'a'}}") == []


def test_a_model_without_a_tokenizer_is_reported(model: Path) -> None:
    assert errors(f"policy.model={model}") == []
    (model / "tokenizer.json").unlink()
    [line] = errors(f"policy.model={model}")
    assert line.startswith(f"policy.model: {model} has no tokenizer (none of tokenizer.json")


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_reported(where: str, model: Path) -> None:
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((model / where).read_text())
    if where == "tokenizer.json":
        tokenizer["model"]["vocab"]["<one more>"] = size
    else:
        tokenizer["added_tokens_decoder"] = {str(size): {"content": "<one more>"}}
    (model / where).write_text(json.dumps(tokenizer))
    [line] = errors(f"policy.model={model}")
    assert f"its tokenizer has token {size}, but its config.json has a vocabulary of {size}; enlarge" in line


def test_messages_need_a_chat_template_and_text_does_not(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    text = {"prompt": "1+1=", "answer": "2"}
    chat = text | {"prompt": [{"role": "user", "content": "1+1="}]}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (text, chat)))
    data = f"data.train.source=jsonl:{rows}"
    assert errors(data, f"policy.model={model}") == []
    (model / "chat_template.jinja").unlink()
    [line] = errors(data, f"policy.model={model}")
    assert f"{model} has no chat template (chat_template.jinja), which data.train.source: {rows}:2 needs" in line
    assert errors(f"policy.model={model}") == []
    [line] = errors(f"policy.model={model}", "workflow={function: builtin:calculator}")
    assert "which workflow.function builtin:calculator needs" in line
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages }}"}))
    assert errors(data, f"policy.model={model}") == []


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_reported(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head}, file)
    given = load(QUICKSTART, [f"policy.model={model}"])
    assert errors(f"policy.model={model}") == preflight.check_host(given) == []
    save_file(tensors | {"lm_head.weight": head[::-1].copy()}, file)
    [line] = errors(f"policy.model={model}")
    assert line.startswith(f"policy.model: {model}: config.json ties lm_head.weight to model.embed_tokens.weight")
    assert preflight.check_host(given) == [line]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path)


def test_incompletely_copied_weights_are_reported(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, len(whole) + 1):
        file.write_bytes((whole + b"\0")[:size])
        [line] = problems(write(folder))
        assert f"{file} has {size} bytes, but its header promises {len(whole)}: it was not copied completely" in line


def test_a_missing_weights_file_that_the_index_lists_is_reported(folder: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    [line] = problems(write(folder))
    assert "has no model-00002-of-00002.safetensors, which its model.safetensors.index.json names" in line


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_experts": 8, "moe_intermediate_size": 48, "hidden_size": 64}, "an expert has 48 rows"),
        ({"num_local_experts": 4, "intermediate_size": 64, "hidden_size": 48}, "an expert has 48 inputs"),
        ({"text_config": {"n_routed_experts": 64, "moe_intermediate_size": 16}}, "an expert has 16 rows"),
        ({"model_type": "gpt_neox"}, "the model is a gpt_neox"),
    ],
)
def test_models_whose_weights_vllm_does_not_accept_are_refused_with_the_vllm_engine(
    config: dict[str, object], why: str, folder: Path
) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(config))
    load(write(folder))
    [line] = problems(edited(folder, "    instances: 2\n", "    instances: 2\n    engine: vllm\n"))
    assert line.startswith("t.yaml:26: services.rollout.engine: vllm: ")
    assert why in line
    assert line.endswith("; use engine transformers")


def test_vllm_accepts_mixtures_of_experts_but_no_adapters_of_them(folder: Path) -> None:
    config = {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 64, "hidden_size": 64}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    path = edited(folder, "    instances: 2\n", "    instances: 2\n    engine: vllm\n")
    load(path)
    refused = [line for line in problems(path, "policy.lora={rank: 8}") if "engine: vllm" in line]
    assert refused == [
        "t.yaml:26: services.rollout.engine: vllm: the model is a mixture of 4 experts, for which vLLM takes no "
        "adapter here; use engine transformers"
    ]


def test_a_dry_run_and_a_start_give_the_same_one_line_error_and_leave_no_files(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    (tmp_path / "my_functions.py").write_text(MODULE)
    given = (f"policy.model={model}", "reward.function=my_functions:plain")
    sets = [part for each in given for part in ("--set", each)]
    command = [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(tmp_path / "run"), *sets]
    said = []
    for more in ([], ["--dry-run"]):
        began = time.monotonic()
        done = subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env=child_environment(1),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert time.monotonic() - began < 30
        said.append(done.stderr.splitlines())
        assert not (tmp_path / "run").exists()
    assert said[0] == said[1]
    assert [line.split(": ")[1] for line in said[0]] == ["reward.function", "policy.model"]


def test_snapshots_that_do_not_fit_are_turned_off_and_one_line_reports_it() -> None:
    topology = load(QUICKSTART)
    needed = snapshot_bytes(topology)
    assert 4 << 20 < needed < topology.checkpoint.memory
    assert preflight.with_room(topology) == topology
    fits = load(QUICKSTART, [f"checkpoint.memory={needed}"])
    assert preflight.with_room(fits) == fits
    small = load(QUICKSTART, [f"checkpoint.memory={needed - 1}"])
    (line,) = preflight.check(small, "t.yaml").warnings
    assert line.startswith(f"t.yaml: checkpoint.memory: snapshots of the trainer need {format_size(needed)}, but the")
    assert "\n" not in line
    assert preflight.with_room(small).checkpoint.memory_every is None
    assert preflight.with_room(small).checkpoint.every == topology.checkpoint.every
    off = load(QUICKSTART, [f"checkpoint.memory={needed - 1}", "checkpoint.memory_every=null"])
    assert preflight.check(off, "t.yaml").warnings == []


def test_snapshots_are_turned_off_if_shared_memory_cannot_hold_them_alongside_the_store() -> None:
    free = shutil.disk_usage("/dev/shm").free
    tight = load(QUICKSTART, [f"services.batch-store.memory={free - (1 << 20)}"])
    (line,) = [each for each in preflight.check(tight, "t.yaml").warnings if "snapshots" in each]
    assert "left after setting aside services.batch-store.memory" in line
    assert preflight.with_room(tight).checkpoint.memory_every is None


def test_more_remote_processes_than_the_scheduler_can_accept_connections_from_are_refused() -> None:
    places = ("placement.hosts={b: {}}", "services.rollout.host=b", "transport.listen=127.0.0.1")
    places += ("services.batch-store.memory=64GiB",)
    most = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    with_store = f"services.rollout.instances={most}"
    [line] = [each for each in errors(*places, with_store) if each.startswith("placement")]
    assert line.startswith(
        f"placement: {most + 1} processes on other hosts connect to the scheduler, which accepts {most}"
    )
    assert not [each for each in errors(*places, f"services.rollout.instances={most - 1}") if "connect" in each]


IPC = (
    "staleness=0",
    "services.rollout={engine: vllm, weights: ipc, gpus: 1}",
    "services.policy-trainer.gpus=1",
    "placement.colocate=[policy-trainer, rollout]",
)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_engines_cannot_open_is_refused_for_weights_over_ipc(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        f"services.rollout.weights: ipc: {name} has expandable_segments:True, and engines cannot open such memory; "
        "remove that, or use weights: nccl"
    )
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:True")
    assert line in errors(*IPC)
    monkeypatch.setenv(name, "expandable_segments:False")
    assert line not in errors(*IPC)


def test_a_missing_compiler_is_reported_if_vllm_compiles_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*overrides: str) -> bool:
        found = preflight.check(load(QUICKSTART, list(overrides)), "t.yaml").warnings
        return any("needs a C++ compiler, but there is no no-such-compiler; install it" in line for line in found)

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert warned(*IPC)
    assert not warned(*IPC, "services.rollout.engine_args={enforce_eager: true}")
    assert not warned("services.rollout={engine: vllm}")
    monkeypatch.setenv("CXX", "sh")
    assert not warned(*IPC)


def test_an_exporter_whose_port_or_token_cannot_be_used_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        found = errors(f"monitor.prometheus={{listen: '{address}', token: {token}}}")
    assert [line for line in found if "prometheus" in line] == [
        f"monitor.prometheus.token: {token}: 5 characters; it must be one ASCII word of 16 or more: "
        "openssl rand -hex 24 > FILE; chmod 600 FILE",
        f"monitor.prometheus.listen: {address.partition(':')[2]} cannot be used (Address already in use); "
        "choose another",
    ]


def test_an_exporter_without_its_libraries_is_refused_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if "site-packages" not in path])
    for name in [name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    wanted = load(QUICKSTART, ["monitor.prometheus={}", "monitor.traces={otlp: 'http://localhost:4318'}"])
    assert preflight.missing_libraries(wanted) == [
        "monitor.prometheus: needs the package prometheus_client, which is not installed; run make setup-observability",
        "monitor.traces.otlp: needs the package opentelemetry.proto, which is not installed; run make "
        "setup-observability",
    ]
    assert preflight.missing_libraries(load(QUICKSTART, ["monitor.traces={}"])) == []
