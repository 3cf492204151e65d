"""No import or call in the product executes bytes as code, and the light modules do not import torch.

The product's modules are not imported into the test process: the light modules are checked in separate processes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "shared", "services", "launch")
# This folder contains data shipped with the product: topologies, models and the scripts that made them.
TOPOLOGIES = Path("launch", "topologies")

# These modules can execute the bytes that they deserialise.
FORBIDDEN_MODULES = frozenset(
    {
        "pickle",
        "_pickle",
        "pickletools",
        "marshal",
        "shelve",
        "cloudpickle",
        "dill",
        "jsonpickle",
        "joblib",
        "multiprocessing",  # Its queues, pipes and pools use pickle.
    }
)
# Functions are listed by the full names that the imports of a file give them.
FORBIDDEN_FUNCTIONS = frozenset(
    {
        "torch.load",
        "torch.save",
        "torch.serialization.load",
        "torch.serialization.save",
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.full_load_all",
        "yaml.unsafe_load",
        "yaml.unsafe_load_all",
        "ruamel.yaml.load",
        "ruamel.yaml.load_all",
        "builtins.eval",
        "builtins.exec",
        "concurrent.futures.ProcessPoolExecutor",
        "numpy.lib.format.read_array",
        "pandas.read_pickle",
    }
)
# These methods use pickle, whatever object they belong to (a socket, a process group).
FORBIDDEN_NAMES = frozenset(
    {
        "recv_pyobj",
        "send_pyobj",
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)
FORBIDDEN_BUILTINS = frozenset({"eval", "exec"})
IMPORT_BY_NAME = frozenset({"importlib.import_module", "importlib.__import__", "builtins.__import__", "__import__"})
NUMPY_LOAD = frozenset({"numpy.load"})
PICKLE_ARGUMENT = 2
"""Position of `allow_pickle` among numpy.load's arguments, counted from 0."""

LIGHT_MODULES = (
    "services.scheduler.server",
    "services.batch_store.server",
    "services.monitor.server",
    "services.policy_trainer.driver",
    "launch.cluster",
    "launch.ctl",
    "launch.host",
    "launch.placement.ray_keeper",
    "launch.monitor",
    "launch.viewers.terminal.app",
)
HEAVY_MODULES = ("torch", "transformers", "megatron", "vllm", "starlette", "uvicorn", "httpx2")

PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted(set(sys.argv[2:]) & set(sys.modules)))
"""


def aliases(tree: ast.AST) -> dict[str, str]:
    """Map each name that an import binds in this file to its full name."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def full_name(node: ast.AST, bound: dict[str, str]) -> str:
    """Return the dotted name of an expression with imports resolved, or '' if it is not one."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := full_name(node.value, bound)):
        return f"{owner}.{node.attr}"
    return ""


def faults_of(node: ast.AST, bound: dict[str, str]) -> Iterator[str]:
    """Yield the forbidden uses in this one node."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name.partition(".")[0] in FORBIDDEN_MODULES)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if node.module.partition(".")[0] in FORBIDDEN_MODULES:
            yield node.module
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if alias.name in FORBIDDEN_NAMES or name in FORBIDDEN_FUNCTIONS:
                yield name
    elif isinstance(node, ast.Attribute):
        name = full_name(node, bound)
        if node.attr in FORBIDDEN_NAMES or name in FORBIDDEN_FUNCTIONS:
            yield name or node.attr
    elif isinstance(node, ast.Name):
        # A field may be called `eval`; only a read of the name refers to the builtin.
        if node.id in FORBIDDEN_BUILTINS and node.id not in bound and isinstance(node.ctx, ast.Load):
            yield node.id
    elif isinstance(node, ast.Call):
        target = full_name(node.func, bound)
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if target in IMPORT_BY_NAME and str(first).partition(".")[0] in FORBIDDEN_MODULES:
            yield f"{target}({first!r})"
        if target in NUMPY_LOAD and len(node.args) > PICKLE_ARGUMENT:
            yield f"{target} with allow_pickle by position"
        named = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
        if target == "getattr" and named in FORBIDDEN_BUILTINS | FORBIDDEN_NAMES:
            yield f"getattr(…, {named!r})"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "allow_pickle" and value is not False:
                yield "allow_pickle"
            if keyword.arg == "trust_remote_code" and value is not False:
                yield "trust_remote_code"
            if keyword.arg == "typ" and value == "unsafe" and target.rpartition(".")[2] == "YAML":
                yield "YAML(typ='unsafe')"


def faults_in(source: str) -> list[str]:
    """Return `line: what` for each forbidden import, call or mention in a Python source text."""
    tree = ast.parse(source)
    bound = aliases(tree)
    return [
        f"{node.lineno}: {fault}"
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr)
        for fault in faults_of(node, bound)
    ]


def run_python(*argv: str, cwd: Path) -> str:
    """Run a fresh interpreter and return its standard output without the last newline."""
    done = subprocess.run([sys.executable, *argv], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize("package", PACKAGES)
def test_product_never_executes_bytes_as_code(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package}/ holds no Python file"
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in files for fault in faults_in(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_code_folder_is_a_package(package: str) -> None:
    """A folder without `__init__.py` would be missing from wheels and ignored by the import contracts."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")}
    code = {folder for folder in folders if not folder.is_relative_to(TOPOLOGIES)}
    assert not [str(folder) for folder in sorted(code) if not (ROOT / folder / "__init__.py").is_file()]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "import os, marshal",
        "from pickle import loads",
        "import cloudpickle.compat",
        "def f():\n    import dill",
        "__import__('pickle')",
        "import importlib\nimportlib.import_module('marshal')",
        "from importlib import import_module as load\nload('pickle')",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "import torch\nload = torch.load",
        "from torch import load",
        "from torch.serialization import load as read",
        "import torch\ntorch.save({}, 'x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "import torch.distributed as dist\ndist.gather_object(1)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import torch.distributed as dist\ndist.scatter_object_list([], [])",
        "import torch.distributed as dist\ndist.send_object_list([])",
        "import torch.distributed as dist\ndist.recv_object_list([])",
        "from torch.distributed import all_gather_object",
        "self.socket.recv_pyobj()",
        "socket().send_pyobj(1)",
        "eval('1')",
        "exec('1')",
        "run = eval",
        "import builtins\nbuiltins.exec('1')",
        "from builtins import eval as run",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml as y\ny.unsafe_load(text)",
        "from yaml import load",
        "from ruamel.yaml import YAML\nYAML(typ='unsafe')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy\nnumpy.load('x', None, True)",
        "import builtins\nbuiltins.eval('1')",
        "import builtins\ngetattr(builtins, 'eval')('1')",
        "import torch.distributed as dist\ngetattr(dist, 'all_gather_object')([], 1)",
        "import importlib\nimportlib.import_module('pickle')",
        "import importlib\nimportlib.__import__('pickle')",
        "import yaml\nyaml.full_load(text)",
        "import multiprocessing",
        "from multiprocessing import shared_memory, Queue",
        "from concurrent.futures import ProcessPoolExecutor",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
    ],
)
def test_checker_reports_a_forbidden_use(source: str) -> None:
    assert faults_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "class Data:\n    eval: dict[str, int]",
        "import yaml\nyaml.safe_load(text)",
        "from ruamel.yaml import YAML\nreader = YAML(typ='safe')\nreader.load(text)",
        "from safetensors.torch import load_file, save_file",
        "import json\njson.load(handle)",
        "from .pickle import sour",
        "import importlib\nimportlib.import_module('json')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "'pickle, eval and torch.load in a text'",
    ],
)
def test_checker_accepts_a_permitted_use(source: str) -> None:
    assert faults_in(source) == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_module_does_not_import_model_libraries(module: str) -> None:
    assert run_python("-c", PROBE, module, *HEAVY_MODULES, cwd=ROOT) == ""


def test_probe_detects_an_import_of_torch() -> None:
    assert run_python("-c", PROBE, "torch.version", *HEAVY_MODULES, cwd=ROOT) == "torch"


def test_project_folder_precedes_installed_packages_on_the_path(tmp_path: Path) -> None:
    """proto-plus also installs a top-level `proto`; from any folder, ours is the one that is found."""
    path = run_python("-c", "import sys; print(*sys.path, sep='\\n')", cwd=tmp_path).splitlines()
    assert str(ROOT) in path, "the project is not on the path of a fresh interpreter; run `make setup`"
    assert path.index(str(ROOT)) < path.index(sysconfig.get_path("purelib"))


def test_proto_is_our_package_from_any_folder(tmp_path: Path) -> None:
    found = run_python("-c", "import proto; print(proto.__file__)", cwd=tmp_path)
    assert found == str(ROOT / "proto" / "__init__.py")
