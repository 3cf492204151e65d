"""Tells, before a start, what the run does with the routers of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from shared.topology import Topology
from shared.topology.model_files import CHOSEN, experts, read_config
from shared.topology.models import POLICY, FrozenModel, TrainedModel
from shared.topology.passes import Verdict


def problems(topology: Topology, proof: Verdict, model: TrainedModel | FrozenModel) -> Iterator[str]:
    """Yield the reasons why the run cannot replay the routes of its policy or balance the load of its experts."""
    algorithm = topology.algorithm
    if model.name != POLICY or not proof.unwatched:
        return
    if algorithm.router_replay != "none":
        yield f"algorithm.router_replay: {algorithm.router_replay}: {proof.unwatched}; use none"
    if algorithm.load_balance.coef:
        yield f"algorithm.load_balance.coef: {algorithm.load_balance.coef:g}: {proof.unwatched}; use 0"


def notes(topology: Topology, proof: Verdict, model: TrainedModel | FrozenModel) -> list[str]:
    """Return lines that tell what the model's configuration says in vain, or [] for a dense model."""
    config = read_config(str(model.folder))
    count = experts(config)
    if not count or model.name != POLICY or topology.serve is not None:
        return []
    chosen = next((config[key] for key in CHOSEN if key in config), "some")
    algorithm = topology.algorithm
    does = f"router_replay {algorithm.router_replay}, load_balance.coef {algorithm.load_balance.coef:g}"
    lines = [f"experts        {count} in a layer, {chosen} for each token; {does}"]
    vain = [f"{key} {config[key]}" for key in ("router_aux_loss_coef", "output_router_logits") if config.get(key)]
    if vain:
        lines.append(
            f"               without effect in config.json: {', '.join(vain)} (algorithm.load_balance has one)"
        )
    if proof.unwatched:
        lines.append(f"               no metrics moe/*: {proof.unwatched}")
    return lines
