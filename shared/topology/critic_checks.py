"""Finds the faults of the section `critic`, and of the options of the estimator that uses its values.

A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

from shared.topology.algorithm import Critic
from shared.topology.capacity import context_tokens
from shared.topology.document import Found
from shared.topology.model_files import read_config
from shared.topology.models import CRITIC
from shared.topology.schema import Topology


def check(topology: Topology) -> Found:
    """Yield every contradiction between the critic and the rest of the topology."""
    yield from _estimator(topology)
    critic = topology.critic
    if critic is None:
        if topology.services.critic is not None:
            message = "has no effect without a critic; remove it, or add critic with optimizer.lr"
            yield ("services", CRITIC), message
        return
    yield from _use(topology)
    yield from _steps(topology, critic)
    yield from positions(topology, CRITIC, critic.model or topology.policy.model)
    hosts = topology.services.trainers[CRITIC].host if CRITIC in topology.services.trainers else None
    if hosts and hosts[0] != topology.home:
        home = "the host on which the run is started" if topology.home is None else topology.home
        message = f"begins with {hosts[0]}, but the critic's first rank writes its checkpoints on {home}"
        remedy = "leave it out" if topology.home is None else "name that host first"
        yield ("services", CRITIC, "host"), f"{message}; {remedy}"


def _estimator(topology: Topology) -> Found:
    advantage, path = topology.algorithm.advantage, ("algorithm", "advantage")
    if topology.algorithm.loss.from_rows:
        return  # Another check refuses its advantages.
    if advantage.name != "gae":
        for key in ("lam", "lam_value", "truncated"):
            value = getattr(advantage, key)
            if value is not None:
                yield (*path, key), f"{value} has no effect with advantage {advantage.name}; remove it, or use gae"
        return
    if topology.critic is None and not topology.run.evaluate:
        yield (*path, "name"), "gae needs the values of a critic; add critic with optimizer.lr, or use reinforce"
    if advantage.truncated == "bootstrap" and topology.workflow is not None:
        message = "bootstrap needs to know which sequence was cut, but a workflow's sample says only whether one was"
        yield (*path, "truncated"), f"{message}; use end"


def _use(topology: Topology) -> Found:
    algorithm = topology.algorithm
    if algorithm.loss.from_rows:
        message = f"has no effect with loss {algorithm.loss.name}, which does not use advantages; remove it"
        yield (CRITIC,), message
    elif not algorithm.advantage.may_use_values:
        message = f"advantage {algorithm.advantage.name} does not use its values; remove it"
        remedy = "or set algorithm.advantage.name to gae or to a function of yours with per: token"
        yield (CRITIC,), f"{message}, {remedy}"


def _steps(topology: Topology, critic: Critic) -> Found:
    tasks, mini = topology.algorithm.tasks_per_step, critic.mini_batch_tasks
    # A value that the critic has from the algorithm is reported there.
    if mini is not None and tasks % mini and mini != topology.algorithm.mini_batch_tasks:
        message = f"{mini} does not divide algorithm.tasks_per_step ({tasks}); use a divisor"
        yield (CRITIC, "mini_batch_tasks"), message
    if critic.warmup_steps > topology.run.steps:
        message = (
            f"{critic.warmup_steps} is more than run.steps ({topology.run.steps}), so the policy would never learn"
        )
        yield (CRITIC, "warmup_steps"), f"{message}; use less"


def positions(topology: Topology, section: str, folder: str) -> Found:
    """Check that the model of a section has a position for each token of the longest sequence that the policy can
    produce."""
    positions = read_config(folder).get("max_position_embeddings")
    context = context_tokens(topology)
    if not isinstance(positions, int) or folder == topology.policy.model:
        return  # The check of the policy's positions covers it.
    prompt, new = topology.data.train.max_prompt_tokens, topology.sampling.max_new_tokens
    if topology.workflow is not None:
        longest = min(topology.workflow.max_tokens, context or topology.workflow.max_tokens)
        said, remedy = f"sequences of up to {longest} tokens", "lower workflow.max_tokens"
    elif prompt is not None:
        longest, remedy = prompt + new, "lower one of them"
        said = f"{prompt} prompt tokens (data.train.max_prompt_tokens) and {new} new (sampling.max_new_tokens)"
    else:
        longest, remedy = context or positions + 1, f"set data.train.max_prompt_tokens to at most {positions - new}"
        said = f"sequences of up to {context} tokens" if context else "prompts of any length"
        if positions <= new:
            said, remedy = f"{new} new tokens (sampling.max_new_tokens)", "lower them"
    if longest > positions:
        message = f"{said} exceed the {section}'s {positions} positions; {remedy}, or use a {section} with more"
        yield (section, "model"), message
