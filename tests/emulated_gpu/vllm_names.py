"""Every name, argument and option of vLLM that this project uses exists in the classes for GPUs of vLLM's CUDA build.

vLLM changes the process that imports it, so `test_product` runs these tests in a process of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proto.messages import DeviceMemory, TransferOffer, TransferParameter
from services.rollout.engines import vllm_offer, vllm_setup
from services.rollout.engines.proof.load_trace import EXPERTS
from shared.ranks.meeting import Meeting
from shared.topology.services import WeightsRoute
from tests.emulated_gpu.vllm_process import import_vllm

OPERATIONS = import_vllm()
ENGINES = Path(vllm_setup.__file__).parent
CPU_ONLY = frozenset({"leave_host_memory", "take_host_memory", "unname_shared_memory"})
"""Our methods that the engine calls on CPUs only."""


def vllm(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"vllm.{module}"), name)


WORKER = vllm("v1.worker.gpu_worker", "Worker")
LLM_ENGINE = vllm("v1.engine.llm_engine", "LLMEngine")
MODEL_RUNNERS = [
    vllm(module, "GPUModelRunner") for module in ("v1.worker.gpu_model_runner", "v1.worker.gpu.model_runner")
]
"""vLLM has two; VLLM_USE_V2_MODEL_RUNNER chooses."""
EXTENSION = importlib.import_module("services.rollout.engines.vllm_transfer").TransferredWeights
OUR_CLASSES = [base for base in EXTENSION.__mro__ if base is not object]


def our_trees() -> dict[str, ast.Module]:
    return {file.name: ast.parse(file.read_text()) for file in sorted(ENGINES.glob("vllm*.py"))}


def imports() -> Iterator[tuple[str, str, Any]]:
    """Yield (our file, our name, object) for everything that is imported from vLLM."""
    for file, tree in our_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                module = importlib.import_module(node.module or "")
                yield from ((file, alias.asname or alias.name, getattr(module, alias.name)) for alias in node.names)


def uses(tree: ast.AST, owner: str) -> Iterator[tuple[str, ast.Call | None]]:
    """Yield each attribute that is read from `owner`, such as `self._llm`, and its call if it is called."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner:
            yield node.attr, calls.get(id(node))


def members(owner: type) -> dict[str, Any]:
    """Return the attributes of a class, and the names that it annotates or that its methods set."""
    named: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("vllm."):
            named |= dict.fromkeys(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base)))
            named |= dict.fromkeys(inspect.get_annotations(base))
        named |= vars(base)
    return named


def check(owner: type, name: str, call: ast.Call | None) -> str:
    """Return why `owner` has no such member, or why it cannot be called so, or "". Starred arguments are not judged."""
    if name not in members(owner):
        return f"there is no {name}"
    if call is None or members(owner)[name] is None:
        return ""
    plain = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    words = {word.arg: None for word in call.keywords if word.arg is not None}
    starred = len(plain) < len(call.args) or len(words) < len(call.keywords)
    own = [None] if inspect.isfunction(members(owner)[name]) else []
    signature = inspect.signature(getattr(owner, name))
    try:
        (signature.bind_partial if starred else signature.bind)(*own, *plain, **words)
    except TypeError as error:
        return f"{name}: {error}"
    return ""


def test_calls_and_attributes_of_imported_classes_exist() -> None:
    checked = set()
    for file, ours, imported in imports():
        if not inspect.isclass(imported):
            continue
        for attribute, call in uses(our_trees()[file], ours):
            assert not check(imported, attribute, call), f"{file}: {ours}: {check(imported, attribute, call)}"
            checked.add(attribute)
        for node in ast.walk(our_trees()[file]):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == ours:
                words = {word.arg for word in node.keywords if word.arg is not None}
                assert words <= members(imported).keys(), f"{file}: {ours}()"
                checked |= words
    assert {"from_engine_args", "FINAL_ONLY", "LLM_CLASS", "flat_logprobs", "backend"} <= checked


@pytest.mark.parametrize(
    ("owner", "ours", "some"),
    [
        (LLM_ENGINE, "self._llm", {"collective_rpc", "add_request", "sleep", "wake_up", "reset_prefix_cache"}),
        (vllm("platforms.cuda", "CudaPlatform"), "current_platform", {"is_cpu"}),
    ],
)
def test_the_engine_and_the_platform_have_the_members_that_we_use(owner: type, ours: str, some: set[str]) -> None:
    used = list(uses(our_trees()["vllm_engine.py"], ours))
    assert some <= {name for name, _ in used}
    assert [(name, why) for name, call in used if (why := check(owner, name, call))] == []


def test_the_worker_and_both_model_runners_have_the_members_that_our_extension_uses() -> None:
    wrong, used = [], set()
    for ours in OUR_CLASSES:
        theirs = inspect.get_annotations(ours).keys() - vars(ours).keys()
        tree = ast.parse(inspect.getsource(ours)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for name, call in uses(tree, "self"):
            if name in theirs and not name.startswith("_"):
                used.add(name)
                wrong.append(check(WORKER, name, call))
        for method in tree.body:
            if isinstance(method, ast.FunctionDef) and method.name not in CPU_ONLY:
                for name, call in uses(method, "self.model_runner"):
                    used.add(name)
                    wrong += [check(runner, name, call) for runner in MODEL_RUNNERS]
    assert {"reload_weights", "model_runner", "get_model", "update_weights", "weight_transfer_engine"} <= used
    assert [why for why in wrong if why] == []


def test_the_layers_of_experts_have_the_members_that_packing_and_proof_use() -> None:
    fused_moe = "model_executor.layers.fused_moe"
    method = vllm(f"{fused_moe}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod")
    kernel, experts = (vllm(f"{fused_moe}.modular_kernel", name) for name in ("FusedMoEKernel", "FusedMoEExperts"))
    assert "moe_kernel" in members(method)
    assert "fused_experts" in members(kernel)
    assert "process_weights_after_loading" in members(experts)
    assert "isa" not in members(experts)  # marks the kernels that read packed weights, which run on CPUs only
    created = inspect.getsource(method.create_weights)
    assert all(f'register_parameter("{name}"' in created for name in EXPERTS)
    assert "hf_config" in members(vllm("config", "ModelConfig"))


def test_the_methods_of_our_extension_do_not_hide_those_of_the_worker() -> None:
    methods = {name for ours in OUR_CLASSES for name, value in vars(ours).items() if inspect.isfunction(value)}
    assert len(methods) > 10
    assert methods & members(WORKER).keys() == set()


def test_options_of_the_engine_exist() -> None:
    fields = {field.name for field in dataclasses.fields(vllm("engine.arg_utils", "EngineArgs"))}
    options = vllm_setup.arguments_of({}, fields, on_cpu=False, in_flight="keep")
    adapters = vllm_setup.adapter_arguments(8, ["q_proj"], live=2)
    fixed = vllm_setup.fixed_arguments(Path("model"), "bfloat16", "nccl", ranks=2)
    assert {"logprobs_mode", "worker_extension_cls", "weight_transfer_config"} <= fixed.keys()
    assert {*fixed, *adapters, *options} - fields == set()


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


@pytest.mark.parametrize(("route", "carrier"), [("nccl", {"unique_id": bytes(128)}), ("ipc", {"memory": MEMORY})])
def test_routes_send_the_fields_that_vllm_reads(route: WeightsRoute, carrier: dict[str, Any]) -> None:
    receiver = vllm("distributed.weight_transfer", "WeightTransferEngineFactory")._registry[route]()
    parameters = [TransferParameter("a", "bfloat16", [2])]
    offer = TransferOffer(communicator=1, number=1, deadline_s=1.0, parameters=parameters, **carrier)
    receiver.init_info_cls(**vllm_offer.joining(route, offer, Meeting("lo"), ranks=2))
    receiver.update_info_cls(**vllm_offer.announcing(offer))


def test_missing_names_and_arguments_are_noticed() -> None:
    for call, why in {
        "llm.sleep(depth=2)": "sleep: got an unexpected keyword argument 'depth'",
        "llm.add_request()": "add_request: missing a required argument: 'request_id'",
        "llm.step(1)": "step: too many positional arguments",
        "llm.no_such()": "there is no no_such",
    }.items():
        [(name, node)] = uses(ast.parse(call), "llm")
        assert check(LLM_ENGINE, name, node) == why
