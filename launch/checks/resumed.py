"""Compares a run that is resumed with the topology, the data and the models with which it began, and records these."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import structlog

from launch.checks.findings import Findings
from launch.checks.preflight import sources
from launch.processes.plan import SUPERVISOR
from proto.messages import ErrorCode
from shared.data.source import RowDigests
from shared.inputs import Inputs, changed, compared, shortened, uncertain, with_digest
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.topology import Topology, load_resolved
from shared.topology.load import value_at

DERIVED = "services.rollout.block_tasks"
"""A fixed key whose default depends on keys that may change. If it is not written, a resumed run keeps its value."""
PASSES = frozenset({"policy.passes", "critic.passes", "teacher.passes", "reward_model.passes"})
"""Keys of fixed sections that are fixed only in deterministic mode, because other passes change nothing but the last
bits."""
FIXED = (
    "run.seed",
    "run.deterministic",
    "policy",
    "critic",
    "teacher",
    "reward_model.model",
    "data.train",
    "data.eval.*.source",
    "data.eval.*.rows",
    "data.eval.*.samples",
    "data.eval.*.every",
    "staleness",
    "consume",
    "algorithm.tasks_per_step",
    "algorithm.group_size",
    "algorithm.filter_zero_variance",
    "algorithm.kl.refresh_every",
    "algorithm.router_replay",
    "serve.full_training",
    DERIVED,
)
"""Keys fixed by the journal and the checkpoints of a run, because other values would contradict them."""
FIXED_BITS = (
    "data.eval",
    "reward",
    "reward_model",
    "sampling",
    "algorithm",
    "optimizer",
    "services.policy-trainer",
    "services.critic",
    "services.reference",
    "services.teacher",
    "services.reward-model",
    "services.rollout.threads",
)
"""Keys that are also fixed in deterministic mode, because the bits of the result depend on them."""
_NICE = 19


def kept(path: Path, topology: Topology, written: dict[str, Any]) -> list[str]:
    """Return the overrides with which `topology` keeps the value of `DERIVED` with which the run in `path` began.

    There are none if `written`, the keys that the user gave, has a value for it, or if other keys differ that must not,
    because `begun` refuses those. Raises RpcError(bad_request) if there is no run, and TopologyError.
    """
    old, _, differ = _compared(path, topology)
    if differ != [DERIVED] or _value(written, DERIVED) is not None:
        return []
    return [f"{DERIVED}={_value(old.document(), DERIVED)}"]


def begun(path: Path, topology: Topology) -> tuple[Inputs, Topology]:
    """Return the record of the inputs with which the run in `path` began, and `topology` with the passes with which it
    began, unless it names other ones.

    Raises RpcError(bad_request) if there is no run, if it began with other values of keys in `FIXED` or `FIXED_BITS`,
    or if the record is damaged, and OSError.
    """
    _, topology, differ = _compared(path, topology)
    if differ:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"run directory {path}: was begun with different values of {', '.join(differ)}; "
            f"resume it with {path / 'topology.yaml'}, or begin a new run",
        )
    return Inputs.load(path), topology


def _compared(path: Path, topology: Topology) -> tuple[Topology, Topology, list[str]]:
    """Return the topology with which the run in `path` began, `topology` with its passes, and the fixed keys that
    differ."""
    old = load_resolved(RunDir.open(path).topology)
    passes = {model.section: model.passes for model in old.own_models if model.passes is not None}
    given = {model.section for model in topology.own_models if model.passes is not None}
    topology = topology.with_passes({name: own for name, own in passes.items() if name not in given})
    then, now = old.document(), topology.document()
    for name in {model.section for model in old.own_models} & {model.section for model in topology.own_models}:
        if name not in passes or not topology.run.deterministic:
            then[name]["passes"] = now[name]["passes"]  # see PASSES
    fixed = FIXED + FIXED_BITS if topology.run.deterministic else FIXED
    if topology.run.deterministic and topology.schedules_follow_length:
        fixed = (*fixed, "run.steps")
    differ = [name for key in fixed for name in _different(key, _value(then, key), _value(now, key))]
    kinds = [(each.algorithm.loss.from_rows, each.algorithm.loss.compares) for each in (old, topology)]
    references = [each.needs_reference for each in (old, topology)]
    if kinds[0] != kinds[1] or (old.algorithm.loss.compares and references[0] != references[1]):
        differ = list(dict.fromkeys([*differ, "algorithm.loss.name"]))
    elif old.needs_reference != topology.needs_reference and not any(key.startswith("algorithm.kl") for key in differ):
        differ.append("algorithm.kl")
    elif old.reference_by_trainer != topology.reference_by_trainer and "policy.lora" not in differ:
        differ.append("services.reference")
    # The value of DERIVED may follow from the others.
    return old, topology, [key for key in differ if key != DERIVED] or differ


def _different(key: str, then: Any, now: Any) -> list[str]:
    """Return the keys of a section that differ, or `key` itself if it was added or removed, or is no section."""
    if then == now:
        return []
    if "*" in key or not isinstance(then, dict) or not isinstance(now, dict):
        return [key]
    return [each for name in {**then, **now} for each in _different(f"{key}.{name}", then.get(name), now.get(name))]


def _value(data: dict[str, Any], key: str) -> Any:
    return value_at(data, (*key.split("."),))


def inputs_now(topology: Topology, rows: dict[str, RowDigests], then: Inputs) -> Inputs:
    """Return the inputs as they are now, for a comparison with `then`. `rows` are those that the checks before a start
    have read. Raises OSError."""
    models = {
        key: compared(folder, then.models.get(key, {}))
        for key, folder in _models(topology).items()
        if folder.is_dir()  # The model of a dry run need not be in the cache.
    }
    return Inputs(rows, models)


def compare(path: Path, topology: Topology, then: Inputs, now: Inputs, findings: Findings) -> None:
    """Add an error for each input with which the run in `path` cannot continue, and a warning if some inputs cannot be
    compared."""
    named = {**sources(topology), **_models(topology)}
    began = f"with which the run in {path} began"
    unknown = {*(now.rows.keys() - then.rows.keys()), *(now.models.keys() - then.models.keys())}
    for key in now.rows.keys() & then.rows.keys():
        if why := then.rows[key].difference(now.rows[key]):
            text = f"{named[key]} no longer has the rows {began}: {why}"
            remedy = "restore them (rows may be added at the end), or begin a new run"
            findings.error(f"{key}: {text}; {remedy}")
        elif more := findings.added.get(key):
            text = f"{more} rows were added since the run in {path} began, which goes on with its first"
            findings.warn(f"{key}: {text} {then.rows[key].rows} rows")
    for key in now.models.keys() & then.models.keys():
        if whys := changed(then.models[key], now.models[key]):
            text = f"{named[key]} is not the model {began}: {shortened(whys)}"
            findings.error(f"{key}: {text}; restore it, or begin a new run")
        elif uncertain(then.models[key], now.models[key]):
            unknown.add(key)
    if unknown:
        text = f"has no record of {', '.join(sorted(unknown))} from its start, so nothing can be compared there"
        findings.warnings.append(f"run directory {path}: {text}; it is recorded now")


def _models(topology: Topology) -> dict[str, Path]:
    """Return the folder of each model or adapter that the run reads, by the key that names it."""
    folders = {f"{names[0]}.model": Path(folder) for folder, names in topology.model_folders().items()}
    lora = topology.policy.lora
    if lora is not None and lora.adapter_path is not None:
        folders["policy.lora.adapter_path"] = Path(lora.adapter_path)
    return folders


class ModelReader:
    """Completes the record of a run with the content of its models, on a thread that gives way to the services."""

    def __init__(self, run: RunDir, topology: Topology, inputs: Inputs) -> None:
        self._run, self._folders, self._inputs = run, _models(topology), inputs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="models", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop reading. A file that has not been read is read when the run is resumed."""
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            models = {
                key: {
                    name: file if file.digest else with_digest(self._folders[key], name, file, self._stopped.is_set)
                    for name, file in files.items()
                }
                for key, files in self._inputs.models.items()
            }
            if models != self._inputs.models:
                msgspec.structs.replace(self._inputs, models=models).save(self._run.path)
        except OSError as error:
            structlog.get_logger(SUPERVISOR).warning("the model was not recorded", error=str(error))
