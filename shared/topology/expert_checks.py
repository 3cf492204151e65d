"""Finds the faults of `algorithm.router_replay` and `algorithm.load_balance`: models without experts, and parts of a
run that do not record routes or do not replay them.

A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

from shared.topology.document import Found
from shared.topology.model_files import experts, read_config
from shared.topology.schema import Topology

_REPLAY, _BALANCE = ("algorithm", "router_replay"), ("algorithm", "load_balance", "coef")


def check(topology: Topology) -> Found:
    """Yield every contradiction between the routers' settings and the rest of the topology."""
    algorithm = topology.algorithm
    mode, coef = algorithm.router_replay, algorithm.load_balance.coef
    given: dict[tuple[str, ...], str] = {_REPLAY: mode} if mode != "none" else {}
    given |= {_BALANCE: f"{coef:g}"} if coef else {}
    config = read_config(topology.policy.model)
    for path, value in given.items():
        off = "none" if path is _REPLAY else "0"
        if config and not experts(config):
            yield path, f"{value} has no effect: the policy is no mixture of experts; use {off}"
        if topology.services.policy_trainer.backend != "torch":
            backend = topology.services.policy_trainer.backend
            yield path, f"{value} is for backend torch; {backend} has no such routers; use {off}, or backend torch"
        if algorithm.loss.compares or (path is _REPLAY and algorithm.loss.from_rows):
            yield path, f"{value} has no effect with loss {algorithm.loss.name}, which samples nothing; use {off}"
    if mode == "rollout":
        yield from _recorded(topology)


def _recorded(topology: Topology) -> Found:
    """Check that the engine can record the routes of every token."""
    rollout = topology.services.rollout
    if rollout.engine == "vllm":
        message = "rollout needs the routes of every token, which vLLM records only in its second model runner"
        yield _REPLAY, f"{message}, which rlbus does not use; use train, or engine transformers"
    if rollout.engine == "openai":
        message = "rollout needs the routes of every token, which the API of a server does not return"
        yield _REPLAY, f"{message}; use train, or engine transformers"
    if topology.workflow is not None:
        message = "rollout is for single answers: what a workflow returns has no routes"
        yield _REPLAY, f"{message}; use train, or leave workflow out"
    if rollout.partial_s is not None:
        message = f"{rollout.partial_s:g}: the routes of a resumed sample would come from a second pass over its tokens"
        yield ("services", "rollout", "partial_s"), f"{message} (algorithm.router_replay: rollout); use null"
