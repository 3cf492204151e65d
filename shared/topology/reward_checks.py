"""Finds the faults of the section `reward_model`, whose model gives samples a score.

A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

from shared.evaluation import ACCURACY
from shared.stages import MODEL_PART
from shared.topology.document import Found
from shared.topology.model_files import read_config
from shared.topology.models import REWARD_MODEL, REWARD_MODEL_SECTION
from shared.topology.reward import REWARD_MODEL_FUNCTION
from shared.topology.schema import Topology

_MODEL = (REWARD_MODEL_SECTION, "model")


def check(topology: Topology) -> Found:
    """Yield every contradiction between the reward model and the rest of the topology."""
    reward, section = topology.reward, topology.reward_model
    named = [index for index, term in enumerate(reward.terms) if term.function == REWARD_MODEL_FUNCTION]
    function = ("reward", "function") if reward.function is not None else ("reward", "functions")
    if reward.model is not None and section is not None and reward.model != section.model:
        message = f"{reward.model} has no effect, because reward_model.model is {section.model}"
        yield ("reward", "model"), f"{message}; remove one of them"
    if len(named) > 1:
        yield function, f"{REWARD_MODEL_FUNCTION} is named twice, but a run has one reward model; remove one"
    if section is None:
        if named:
            yield function, f"{REWARD_MODEL_FUNCTION} needs a model; add reward.model: PATH"
        if topology.services.reward_model is not None:
            message = "has no effect without a reward model; remove it, or add reward_model with model"
            yield ("services", REWARD_MODEL), message
        return
    if not named:
        yield _MODEL, f"{section.model} has no effect without function {REWARD_MODEL_FUNCTION}; name it in reward"
    elif reward.terms[named[0]].params:
        yield function, f"{REWARD_MODEL_FUNCTION} takes no params; remove them, and set the keys of reward_model"
    if any(term.function.endswith(f":{MODEL_PART}") for term in reward.terms if term.function != REWARD_MODEL_FUNCTION):
        yield function, f"another function is named {MODEL_PART}, as the score in metrics is; rename it"
    if topology.algorithm.loss.from_rows and not topology.run.evaluate:
        message = f"has nothing to score: loss {topology.algorithm.loss.name} learns from the rows' answers"
        yield _MODEL, f"{message}; name another function in reward, and score with the model by --evaluate"
    metric = topology.checkpoint.keep_best or ""
    if metric.startswith("eval/") and metric.endswith(f"/{ACCURACY}"):
        message = f"{metric} does not exist with a reward model, whose scores are not 0 or 1"
        yield ("checkpoint", "keep_best"), f"{message}; use {metric.removesuffix(ACCURACY)}reward"
    yield from _lengths(topology)


def _lengths(topology: Topology) -> Found:
    section, settings = topology.reward_model, topology.services.reward_model
    positions = read_config(section.model).get("max_position_embeddings") if section is not None else None
    if isinstance(positions, int) and topology.read_tokens > positions:
        message = f"{topology.read_tokens} exceeds the reward model's {positions} positions; use at most that many"
        yield (REWARD_MODEL_SECTION, "max_tokens"), message
    if settings is not None and topology.read_tokens >= settings.max_tokens_per_micro_batch:
        message = f"{settings.max_tokens_per_micro_batch} is not above one text: {topology.read_tokens} tokens"
        remedy = f"use at least {topology.read_tokens + 1}, or lower reward_model.max_tokens"
        yield ("services", REWARD_MODEL, "max_tokens_per_micro_batch"), f"{message}; {remedy}"
