"""Checks, before a start, that the model of the critic fits the policy's tokens, and that value heads can be used."""

from __future__ import annotations

import contextlib

import numpy as np

from launch.checks.findings import Findings
from shared.topology import Topology, model_files
from shared.topology.model_files import VALUE_BIAS, VALUE_WEIGHT, vocabulary, without_head
from shared.topology.models import CRITIC, FrozenModel, TrainedModel

_NOT_MEASURED = "whether it learns from samples of older policies has not been measured"


def check_critic(topology: Topology, findings: Findings) -> None:
    """Check the critic's folder, and warn about settings under which nobody has measured that a critic learns."""
    critic = next((model for model in topology.trained if model.name == CRITIC), None)
    if critic is None:
        return
    if topology.staleness > 1:
        findings.warn(f"staleness: {topology.staleness} with a critic: {_NOT_MEASURED}; use 1 or 0")
    if topology.consume == "completion":
        findings.warn(f"consume: completion with a critic: {_NOT_MEASURED}; use order")
    folder, where = str(critic.folder), f"{CRITIC}.model: {critic.folder}"
    largest, size = model_files.largest_token(topology.policy.model), vocabulary(folder)
    if folder != topology.policy.model and largest is not None and size and largest >= size:
        findings.error(
            f"{where} has a vocabulary of {size}, but the policy's tokenizer has token {largest}; use a model whose "
            f"config.json has a vocab_size of at least {largest + 1}"
        )
    with contextlib.suppress(OSError, ValueError):  # Another check reports it, or the model is not here yet.
        if problem := head_problem(folder):
            findings.error(f"{where}: {problem}")


def check_head(topology: Topology, findings: Findings) -> None:
    """Check the value heads of the folder with which a reward model begins, and of one that scores samples."""
    for model in topology.trained:
        if model.head == "value" and model.name != CRITIC:
            _check_folder(model, findings)
    for frozen in topology.frozen:
        if frozen.head == "value":
            _check_folder(frozen, findings, needed=True)


def _check_folder(model: TrainedModel | FrozenModel, findings: Findings, *, needed: bool = False) -> None:
    folder = str(model.folder)
    with contextlib.suppress(OSError, ValueError):  # Another check reports it, or the model is not here yet.
        if problem := (needed and without_head(folder)) or head_problem(folder):
            findings.error(f"{model.section}.model: {folder}: {problem}")


def head_problem(model: str) -> str:
    """Return, on one line, why the value head in the folder cannot be used, and a remedy; or an empty string, also if
    there is no head. Raises the errors of `stored_tensors`."""
    tensors = model_files.stored_tensors(model)
    weight, bias = tensors.get(VALUE_WEIGHT), tensors.get(VALUE_BIAS)
    if weight is not None and weight.shape[:-1] != (1,):
        return (
            f"{VALUE_WEIGHT} has shape {list(weight.shape)}, but a value head has one value per token "
            "([1, hidden size]); use a model with num_labels 1"
        )
    if bias is None:
        return ""
    stored = np.fromfile(bias.file, np.uint8, bias.end - bias.start, offset=bias.start)
    width = max(len(stored) // max(int(np.prod(bias.shape)), 1), 1)
    stored[width - 1 :: width] &= 0x7F  # without the sign, which -0.0 has
    if not stored.any():
        return ""
    return f"{VALUE_BIAS} is not zero, but a value head has no bias here; use a model whose head has none"
