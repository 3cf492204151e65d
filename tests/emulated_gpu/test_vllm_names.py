"""Every name, argument and option of vLLM that this project uses exists in vLLM's CUDA build, whose classes for GPUs
cannot be imported without a driver. The sources are read (`make fetch-vllm-cuda`); nothing is imported from them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.messages import DeviceMemory, TransferOffer, TransferParameter
from services.rollout.engines import vllm_offer, vllm_setup
from shared.ranks.meeting import Meeting
from shared.topology.services import WeightsRoute
from tests.emulated_gpu.sources import Definition, Sources, Unknown, accepts

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".vllm-cuda"
ENGINES = ROOT / "services" / "rollout" / "engines"
WORKER = ("vllm.v1.worker.gpu_worker", "Worker")
MODEL_RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)
"""vLLM has two; VLLM_USE_V2_MODEL_RUNNER chooses."""
CPU_ONLY = frozenset({"leave_host_memory", "take_host_memory", "unname_shared_memory"})
"""Our methods that the engine calls on CPUs only."""

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="run `make fetch-vllm-cuda`")


@functools.cache
def vllm() -> Sources:
    return Sources(FOLDER)


def our_trees() -> dict[str, ast.Module]:
    return {file.name: ast.parse(file.read_text()) for file in sorted(ENGINES.glob("vllm*.py"))}


def imports() -> Iterator[tuple[str, str, str, str]]:
    """Yield (our file, module, name, our name for it) for everything that is imported from vLLM."""
    for file, tree in our_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                yield from ((file, node.module or "", alias.name, alias.asname or alias.name) for alias in node.names)


def uses(tree: ast.AST, *owner: str) -> Iterator[tuple[str, ast.Call | None]]:
    """Yield each attribute that is read from `self._llm` (or another `owner`), and its call if it is called."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owner:
            yield node.attr, calls.get(id(node))


def check(members: dict[str, Definition], name: str, call: ast.Call | None) -> str:
    if name not in members:
        return f"there is no {name}"
    return accepts(members[name], call) if call is not None else ""


def test_every_import_exists() -> None:
    given = list(imports())
    assert len(given) > 10
    for _, module, name, _ in given:
        vllm().find(module, name)


def test_calls_and_attributes_of_imported_classes_exist() -> None:
    checked = []
    for file, module, name, ours in imports():
        definition = vllm().find(module, name)
        if not isinstance(definition.node, ast.ClassDef):
            continue
        members = vllm().members(definition)
        for attribute, call in uses(our_trees()[file], ours):
            assert not check(members, attribute, call), f"{file}: {ours}.{attribute}: {check(members, attribute, call)}"
            checked.append(attribute)
        for node in ast.walk(our_trees()[file]):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == ours:
                words = {word.arg for word in node.keywords if word.arg is not None}
                assert words <= members.keys(), f"{file}: {ours}(): there is no {words - members.keys()}"
                checked += sorted(words)
    assert {"from_engine_args", "FINAL_ONLY", "LLM_CLASS", "flat_logprobs", "backend"} <= set(checked)


def test_the_platform_says_whether_it_is_a_cpu() -> None:
    """`current_platform` is made when it is first used, so its class is not that of an import."""
    members = vllm().members(vllm().find("vllm.platforms.interface", "Platform"))
    used = list(uses(our_trees()["vllm_engine.py"], "current_platform"))
    assert [name for name, _ in used] == ["is_cpu"]
    assert [why for name, call in used if (why := check(members, name, call))] == []


def test_the_engine_has_the_members_that_we_use() -> None:
    members = vllm().members(vllm().find("vllm.v1.engine.llm_engine", "LLMEngine"))
    used = list(uses(our_trees()["vllm_engine.py"], "self._llm"))
    assert {"collective_rpc", "add_request", "sleep", "wake_up", "reset_prefix_cache"} <= {name for name, _ in used}
    assert [(name, why) for name, call in used if (why := check(members, name, call))] == []


def test_the_worker_and_both_model_runners_have_the_members_that_our_extension_uses() -> None:
    members = vllm().members(vllm().find(*WORKER))
    runners = [vllm().members(vllm().find(*runner)) for runner in MODEL_RUNNERS]
    wrong, used = [], set()
    for file in ("vllm_worker.py", "vllm_transfer.py"):
        tree = our_trees()[file]
        for extension in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            if extension.name not in ("PolicyWeights", "TransferredWeights"):
                continue
            theirs = [
                node.target.id
                for node in extension.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None
            ]
            for name, call in uses(extension, "self"):
                if name in theirs and not name.startswith("_"):
                    used.add(name)
                    wrong += [f"{file}: self.{name}: {why}" for why in [check(members, name, call)] if why]
            for method in extension.body:
                if isinstance(method, ast.FunctionDef) and method.name not in CPU_ONLY:
                    for name, call in uses(method, "self.model_runner"):
                        used.add(name)
                        wrong += [f"{file}: {name}: {why}" for runner in runners if (why := check(runner, name, call))]
    assert {"reload_weights", "model_runner", "get_model", "update_weights", "weight_transfer_engine"} <= used
    assert wrong == []


def test_the_methods_of_our_extension_do_not_hide_those_of_the_worker() -> None:
    members = vllm().members(vllm().find(*WORKER))
    ours = {
        node.name
        for file in ("vllm_worker.py", "vllm_transfer.py")
        for extension in our_trees()[file].body
        if isinstance(extension, ast.ClassDef) and extension.name in ("PolicyWeights", "TransferredWeights")
        for node in extension.body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(ours) > 10
    assert ours & members.keys() == set()


def test_options_of_the_engine_exist() -> None:
    fields = vllm().members(vllm().find("vllm.engine.arg_utils", "EngineArgs"))
    options = vllm_setup.arguments_of({}, set(fields), on_cpu=False, in_flight="keep")
    tree = our_trees()["vllm_engine.py"]
    fixed = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign | ast.AugAssign) and ast.unparse(node.target) == "fixed"
        for table in ast.walk(node)
        if isinstance(table, ast.Dict)
        for key in table.keys
        if isinstance(key, ast.Constant)
    }
    assert {"logprobs_mode", "worker_extension_cls", "weight_transfer_config"} <= fixed
    assert (fixed | options.keys()) - fields.keys() == set()


PARAMETERS = [TransferParameter("a", "bfloat16", [2])]
MEMORY = DeviceMemory(
    gpu="GPU-0",
    nbytes=4,
    handle=b"h",
    storage_bytes=4,
    storage_offset=0,
    counter=b"c",
    counter_offset=0,
    event=b"e",
    event_sync=True,
)
OFFERS = {
    "nccl": TransferOffer(communicator=1, number=1, deadline_s=1.0, parameters=PARAMETERS, unique_id=b"id"),
    "ipc": TransferOffer(communicator=1, number=1, deadline_s=1.0, parameters=PARAMETERS, memory=MEMORY),
}


@pytest.mark.parametrize(("route", "prefix"), [("nccl", "NCCL"), ("ipc", "IPC")])
def test_routes_send_the_fields_that_vllm_reads(route: WeightsRoute, prefix: str) -> None:
    module = f"vllm.distributed.weight_transfer.{route}_engine"
    factory = ast.unparse(vllm().tree("vllm.distributed.weight_transfer.factory"))
    assert (
        f"WeightTransferEngineFactory.register_engine('{route}', '{module}', '{prefix}WeightTransferEngine')" in factory
    )
    joined = vllm_offer.joining(route, OFFERS[route], Meeting("lo"), ranks=2)
    announced = vllm_offer.announcing(OFFERS[route])
    for sent, name in ((joined, "InitInfo"), (announced, "UpdateInfo")):
        fields = vllm().members(vllm().find(module, f"{prefix}WeightTransfer{name}"))
        assert sent.keys() - fields.keys() == set()


def test_missing_names_and_arguments_are_noticed() -> None:
    with pytest.raises(Unknown, match=r"vllm\.sampling_params has no NoSuch"):
        vllm().find("vllm.sampling_params", "NoSuch")
    members = vllm().members(vllm().find("vllm.v1.engine.llm_engine", "LLMEngine"))
    for call, why in {
        "self._llm.sleep(depth=2)": "has no argument depth",
        "self._llm.add_request()": "needs request_id",
        "self._llm.step(1)": "takes 0 positional arguments, not 1",
    }.items():
        node = ast.parse(call, mode="eval").body
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        assert why in check(members, node.func.attr, node)
