"""Finds the faults of the section `policy.lora`: parts of a run that do not compute an adapter, and an adapter to begin
with that is not the one described.

A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

from pathlib import Path

from shared.topology.document import Found
from shared.topology.lora import TENSORS, Lora, differences
from shared.topology.model_files import file_shapes
from shared.topology.models import POLICY
from shared.topology.schema import Topology

_PATH = (POLICY, "lora")


def check(topology: Topology) -> Found:
    """Yield every contradiction between the adapter and the rest of the topology."""
    lora = topology.policy.lora
    if lora is None:
        return
    trainer, rollout, kl = topology.services.policy_trainer, topology.services.rollout, topology.algorithm.kl
    if trainer.backend != "torch":
        message = f"{trainer.backend} has no adapters (policy.lora); use torch, or remove policy.lora"
        yield ("services", "policy-trainer", "backend"), message
    if rollout.engine == "openai":
        message = "openai cannot prove that its server computes with an adapter (policy.lora)"
        yield ("services", "rollout", "engine"), f"{message}; use transformers or vllm, or remove policy.lora"
    if rollout.weights != "shards":
        message = f"{rollout.weights} is for whole models, but a version is an adapter (policy.lora); use shards"
        yield ("services", "rollout", "weights"), message
    if kl is not None and kl.refresh_every is not None and topology.reference_by_trainer:
        message = f"{kl.refresh_every}: the reference is the trainer with its adapter off, which never changes"
        yield ("algorithm", "kl", "refresh_every"), f"{message}; add services.reference: {{}}, or remove it"
    if lora.adapter_path is not None:
        yield from _beginning(lora, lora.adapter_path)


def _beginning(lora: Lora, folder: str) -> Found:
    """Check the adapter with which training begins."""
    try:
        differ = differences(lora, folder)
    except (OSError, ValueError) as error:
        yield (*_PATH, "adapter_path"), str(error)
        return
    try:
        file_shapes(Path(folder) / TENSORS)
    except (OSError, ValueError) as error:
        yield (*_PATH, "adapter_path"), f"{error}; save the adapter again"
    for key, text in differ.items():
        yield (*_PATH, key), f"{text}; use that, or another adapter_path"
