"""Finds out, before a run starts, which forward passes compute its model's log-probs (`shared.model.proof`).

The launcher imports no model library, so a separate process computes the proof, with limits. Results are kept in the
user's cache folder, by everything that they depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from launch.processes.programs import ROOT, child_environment
from shared.topology import Topology
from shared.topology.capacity import max_sample_tokens
from shared.topology.model_files import AnswerEnds
from shared.topology.models import REWARD_MODEL, FrozenModel, TrainedModel
from shared.topology.passes import Verdict, exceeds

T = TypeVar("T")
Model = TrainedModel | FrozenModel
LIMIT_CPU_S, LIMIT_S, LIMIT_BYTES = 30, 300.0, 2 * 1024**3
"""Limits of the process: seconds of processor time, seconds, and bytes of private memory."""
_NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of config.json on which no result depends."""


def prove(topology: Topology, model: Model) -> Verdict:
    """Return the proof for a model of the topology. Raises OSError or ValueError if its config.json cannot be
    read."""
    config = json.loads((model.folder / "config.json").read_bytes())
    longest = topology.read_tokens if model.name == REWARD_MODEL else _longest(topology)
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlbus" / "proofs"
    file = cache / f"{_key(config, longest, model)}.json"
    try:
        return msgspec.structs.replace(msgspec.json.decode(file.read_bytes(), type=Verdict), cpu_s=None)
    except (OSError, msgspec.DecodeError):
        pass  # It is not known yet.
    verdict = compute(model.folder, longest, _lora(model))
    if isinstance(verdict, str):
        return Verdict(reasons=[f"no proof: {verdict}"], model=model.folder.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(verdict))
        partial.replace(file)
    except OSError:
        pass  # It is computed again next time.
    return verdict


def problems(proof: Verdict, model: Model) -> list[str]:
    """Return the reasons why a run cannot use the model, or not with the passes that the topology names."""
    name, wanted = model.section, model.passes
    use = "trained" if isinstance(model, TrainedModel) else "scored with"
    if proof.adapter is not None and proof.adapter.refused:
        return [proof.adapter.refused]
    if proof.refused:
        return [
            f"{name}.model: {proof.model} cannot be {use}: {proof.refused}; use another model or, if its attention "
            "changes beyond a length, keep samples below it (data.train.max_prompt_tokens, sampling.max_new_tokens)"
        ]
    return [
        f"{name}.passes.{key}: {getattr(wanted, key)} is not proved for {proof.model}; use {getattr(proof.passes, key)}"
        for key in (exceeds(wanted, proof.passes) if wanted is not None else ())
    ]


def described(proof: Verdict) -> str:
    """Return one line for human readers."""
    when = "known" if proof.cpu_s is None else f"proved in {proof.cpu_s:.1f} s of processor time"
    return f"{proof.model}: {proof.passes} ({when})"


def _longest(topology: Topology) -> int | None:
    """Return the maximum number of tokens in a sequence, or None if only the data tell."""
    prompt = topology.data.train.max_prompt_tokens
    return None if prompt is None and topology.workflow is None else max_sample_tokens(topology, prompt or 0)


def _lora(model: Model) -> dict[str, Any] | None:
    """Return the settings of the model's adapter on which its layers depend."""
    return None if model.lora is None else model.lora.model_dump(include={"rank", "target_modules", "exclude_modules"})


def _key(config: dict[str, Any], longest: int | None, model: Model) -> str:
    settings = {name: value for name, value in config.items() if name not in _NAMES}
    code = hashlib.sha256()
    for file in sorted((ROOT / "shared" / "model").glob("*.py")):
        code.update(file.read_bytes())
    libraries = version("torch"), version("transformers")
    parts = [settings, longest, *libraries, code.hexdigest(), model.settings.device, _lora(model)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def compute(folder: Path, longest: int | None, lora: dict[str, Any] | None = None) -> Verdict | str:
    """Return the verdict, or why there is none. `lora` is the section of the model's adapter."""
    return _printed("shared.model.proof", [str(folder), json.dumps(longest), json.dumps(lora)], Verdict)


def answer_ends(folder: Path) -> AnswerEnds | str:
    """Return the tokens that end answers of the model in `folder`, or why its tokenizer cannot be used."""
    ends = _printed("shared.tokenizer", [str(folder)], AnswerEnds)
    return f"{folder}: its tokenizer cannot be used: {ends}" if isinstance(ends, str) else ends


def _printed(module: str, arguments: list[str], kind: type[T]) -> T | str:
    """Return the last line that a limited process of a module prints, as JSON of this kind, or why there is none."""
    try:
        with tempfile.TemporaryDirectory() as scratch:  # torch makes a cache folder there, which nothing would remove
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=LIMIT_S,
                env=child_environment(1) | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": scratch},
                preexec_fn=_limit,
                text=True,
            )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=kind)
    except subprocess.TimeoutExpired:
        return f"it took longer than {LIMIT_S:g} s"
    except (OSError, IndexError, msgspec.DecodeError):
        last = (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
        return f"limits are {LIMIT_CPU_S} s of processor time and {LIMIT_BYTES >> 30} GiB: {last[:200]}"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
