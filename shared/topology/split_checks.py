"""Checks that the trainer's and the reference's models can be split as the topology says. It checks the degrees against
the backend and against the numbers in the model's config.json, and the ranks against the hosts.

The module does not import a model library.
"""

from __future__ import annotations

from shared.topology.model_files import read_config
from shared.topology.problem import Found
from shared.topology.schema import Topology
from shared.topology.services import ScorerSettings

MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3")


def check(topology: Topology) -> Found:
    """Yield a problem for each degree that the backend does not support, that does not divide the size it splits, or
    that crosses hosts, and for recomputation that the backend does not support."""
    trainer, reference = topology.services.policy_trainer, topology.services.reference
    yield from _hosts("policy-trainer", trainer, trainer.world_size, len(trainer.host or ()))
    if reference is not None:
        copies, ranks = max(reference.dp, 1), reference.parallel.model_ranks
        yield from _hosts("reference", reference, ranks, min(len(reference.host or ()) // copies, ranks))
    if trainer.recompute == "selective" and trainer.backend == "megatron":
        message = "selective is for backend torch; use layers, or set backend to torch"
        yield ("services", "policy-trainer", "recompute"), message
    for name, service in topology.services.scorers.items():
        yield from _check(topology, name, service, {"tp", "pp"} if name == "policy-trainer" else {"tp", "pp", "cp"})


def _hosts(name: str, service: ScorerSettings, ranks: int, hosts: int) -> Found:
    """Check `ranks` that are divided among `hosts`. Tensor and context parallel ranks exchange data in every layer."""
    if hosts < 2:
        return
    close = service.parallel.tp * service.parallel.cp
    each = ranks // hosts
    if ranks % hosts or each % close:
        rule = f"each host must have the same number of ranks, a multiple of tp*cp = {close}"
        remedy = f"use {hosts * close * max(each // close, 1)} ranks, or fewer hosts"
        yield ("services", name, "host"), f"{hosts} hosts for {ranks} rank{'s' * (ranks > 1)}: {rule}; {remedy}"


def _check(topology: Topology, name: str, service: ScorerSettings, torch_has_no: set[str]) -> Found:
    place = ("services", name)
    degrees = {"tp": service.parallel.tp, "pp": service.parallel.pp, "cp": service.parallel.cp}
    if service.backend == "torch":
        for degree in sorted(torch_has_no):
            if degrees[degree] > 1:
                what = "sequences here" if degree == "cp" else "layers"
                remedy = "set backend to megatron, or use 1"
                message = f"{degrees[degree]} splits {what}, which backend torch does not support; {remedy}"
                yield (*place, "parallel", degree), message
        return
    if topology.policy.dtype not in ("float32", "bfloat16"):
        yield ("policy", "dtype"), f"{topology.policy.dtype}: backend megatron supports float32 and bfloat16"
    config = read_config(topology.policy.model)
    kind = config.get("model_type")
    if kind is not None and kind not in MEGATRON_FAMILIES:
        message = f"megatron supports {', '.join(MEGATRON_FAMILIES)}, but the model is a {kind}; use torch"
        yield (*place, "backend"), message
        return
    heads = config.get("num_attention_heads")
    for degree, what, count in (
        ("tp", "attention heads", heads),
        ("tp", "key-value heads", config.get("num_key_value_heads") or heads),
        ("tp", "columns of the feed-forward layer", config.get("intermediate_size")),
        ("pp", "layers", config.get("num_hidden_layers")),
    ):
        if isinstance(count, int) and count % degrees[degree]:
            message = f"{degrees[degree]} does not divide the model's {count} {what}; use a divisor"
            yield (*place, "parallel", degree), message
