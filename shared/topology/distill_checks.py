"""Finds the faults of the sections `teacher` and `algorithm.distill`, and of the advantage `none`, with which a run
learns from its teacher alone.

A check yields `(path, message)`, as in `checks`.
"""

from __future__ import annotations

from shared.topology.algorithm import NO_REWARD, Distill
from shared.topology.critic_checks import positions
from shared.topology.document import Found
from shared.topology.model_files import vocabulary
from shared.topology.models import TEACHER
from shared.topology.schema import Topology

_DISTILL = ("algorithm", "distill")
_NAME = ("algorithm", "advantage", "name")


def check(topology: Topology) -> Found:
    """Yield every contradiction between the teacher and the rest of the topology."""
    yield from _reward(topology)
    teacher, distill = topology.teacher, topology.algorithm.distill
    if teacher is None and topology.services.teacher is not None:
        yield ("services", TEACHER), "has no effect without a teacher; remove it, or add teacher with model"
    if distill is None:
        if teacher is not None:
            message = "has no effect without algorithm.distill; remove it, or add algorithm.distill: {kl: reverse}"
            yield (TEACHER,), message
        if topology.algorithm.advantage.name == "none" and not topology.run.evaluate:
            message = "none teaches nothing without a teacher; add teacher with model and algorithm.distill"
            yield _NAME, f"{message}, or use another advantage"
        return
    yield from _use(topology, distill)
    yield from _server(topology)
    if teacher is not None:
        yield from positions(topology, TEACHER, teacher.model)


def _use(topology: Topology, distill: Distill) -> Found:
    algorithm = topology.algorithm
    if topology.teacher is None:
        yield _DISTILL, "needs a teacher, whose log-probs it reads; add teacher with model"
    if algorithm.loss.from_rows:
        message = f"has no effect with loss {algorithm.loss.name}, which learns from the rows' answers; remove it"
        yield _DISTILL, message
    if distill.kl == "reverse" and distill.top_k is not None:
        message = f"{distill.top_k} has no effect with kl reverse, which reads the sampled token only; use kl forward"
        yield (*_DISTILL, "top_k"), f"{message}, or remove it"
    if distill.kl == "forward":
        yield from _forward(topology, distill.top_k or 0)


def _forward(topology: Topology, count: int) -> Found:
    teacher = topology.teacher
    models = [topology.policy.model, *([teacher.model] if teacher is not None else [])]
    sizes = [vocabulary(model) for model in models]
    most = min((size for size in sizes if size), default=count)
    if count > most:
        yield (*_DISTILL, "top_k"), f"{count}: the vocabulary has {most} tokens; use at most that many"
    settings = topology.services.teacher
    if settings is not None and settings.backend == "megatron":
        message = "megatron does not support algorithm.distill.kl forward, because its ranks share the vocabulary"
        yield ("services", TEACHER, "backend"), f"{message}; use torch, or kl reverse"


def _server(topology: Topology) -> Found:
    """Check a teacher on a server, of which nothing is here but its answers."""
    teacher, settings = topology.teacher, topology.services.teacher
    if teacher is None or settings is None:
        return
    place = ("services", TEACHER)
    if (settings.backend == "server") != (settings.server is not None):
        if settings.server is None:
            yield (*place, "backend"), "server needs services.teacher.server: {base_url: …}; add it, or use torch"
        else:
            yield (*place, "server"), f"has no effect with backend {settings.backend}; use server, or remove it"
    if settings.server is None or settings.backend != "server":
        return
    url = settings.server.base_url
    if not url.startswith(("http://", "https://")):
        yield (*place, "server", "base_url"), f"{url!r} is not an http address; use one such as http://127.0.0.1:8000"
    if teacher.temperature != 1.0:
        message = f"{teacher.temperature:g}: a server returns the log-probs of its logits as they are; use 1"
        yield (TEACHER, "temperature"), message
    if teacher.model != topology.policy.model:
        message = f"{teacher.model} has no effect with backend server, which names the model in services.teacher.server"
        yield (TEACHER, "model"), f"{message}; remove it"
    for key, given in (("gpus", settings.gpus), ("parallel", settings.parallel.model_ranks > 1)):
        if given:
            yield (*place, key), "has no effect with backend server, which runs the model; remove it"
    if TEACHER in (topology.placement.colocate or ()):
        yield ("placement", "colocate"), "the server keeps its memory, so teacher cannot be colocated; remove it"


def _reward(topology: Topology) -> Found:
    """Check what is computed from rewards in a run in which nothing learns from them, or which has none."""
    algorithm = topology.algorithm
    if any(term.function == NO_REWARD for term in topology.reward.terms):
        if algorithm.advantage.name != "none" and not algorithm.loss.from_rows:
            message = f"{NO_REWARD} gives every sample 0, so advantage {algorithm.advantage.name} learns nothing"
            yield ("reward", "function"), f"{message}; name another function"
        for name in topology.data.eval:
            message = f"needs a reward that tells good answers from bad ones, but {NO_REWARD} gives every sample 0"
            yield ("data", "eval", name), f"{message}; name a function in reward (which training does not use)"
    if algorithm.advantage.name != "none":
        return
    given = {
        "filter_zero_variance": algorithm.filter_zero_variance is not None,
        "overlong_penalty": algorithm.overlong_penalty is not None,
        "normalise_rewards": algorithm.normalise_rewards != "none",
    }
    for key, is_given in given.items():
        if is_given:
            yield ("algorithm", key), "has no effect with advantage none, which does not use rewards; remove it"
    if algorithm.reward_kl is not None:
        message = "reward has no effect with advantage none, which does not use rewards; use loss"
        yield ("algorithm", "kl", "in"), message
