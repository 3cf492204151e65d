"""A scenario of one simulated run: its size and its faults, all drawn from a seed. Scenarios can be made smaller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from shared.topology.models import CRITIC, POLICY_WORKER
from tests.sim.network import Weather

Key = tuple[str, int]
FAULTS_UNTIL_S = 2.5
"""Virtual seconds from the start within which faults begin. An undisturbed run takes two."""


@dataclass(frozen=True)
class Size:
    """The size and mode of a run."""

    steps: int = 3
    tasks: int = 2
    block: int = 1
    staleness: int = 1
    rollouts: int = 1
    ranks: int = 1
    every: int = 1
    keeps: int = 1
    reference: bool = False
    critic: bool = False
    """Whether a critic is trained beside the policy. It has as many ranks, and an update for each task."""
    deterministic: bool = False
    by_completion: bool = False
    evaluates: bool = False
    trains: bool = True
    """Whether the run trains. Otherwise it only evaluates."""
    colocated: bool = False
    """Whether trainer, reference and engine take turns on the same devices."""

    def plan(self) -> list[Key]:
        """Return the processes of the run, in the order of the launcher's plan."""
        plan: list[Key] = [("scheduler", 0), ("batch-store", 0)]
        plan += [(service, rank) for service in self.workers for rank in range(self.ranks)]
        plan += [("policy-trainer", 0)]
        plan += [("reference", 0)] if self.reference else []
        return plan + [("rollout", instance) for instance in range(self.rollouts)]

    @property
    def workers(self) -> list[str]:
        """The services whose processes train a model."""
        return [POLICY_WORKER, *([CRITIC] if self.critic else [])]

    def document(self, model: str) -> dict[str, Any]:
        """Return the topology as a user would write it."""
        algorithm: dict[str, Any] = {
            "tasks_per_step": self.tasks,
            "group_size": 2,
            "advantage": {"name": "grpo"},
            "loss": {"name": "ppo_clip", "clip": [0.2, 0.2], "aggregation": "token_mean", "anchor": "rollout"},
        }
        services: dict[str, Any] = {
            "policy-trainer": {"backend": "torch", "workers": self.ranks, "collective_s": 20.0},
            "rollout": {"instances": self.rollouts, "engine": "transformers", "block_tasks": self.block},
            "batch-store": {"memory": "64MiB"},
        }
        if self.reference:
            algorithm["kl"] = {"estimator": "k3", "in": "loss", "coef": 0.001}
            services["reference"] = {"backend": "torch"}
        critic = {}
        if self.critic:
            algorithm["advantage"] = {"name": "gae", "lam": 0.9}
            critic = {"critic": {"optimizer": {"lr": 1.0e-3}, "mini_batch_tasks": 1}}
        heldout = {"source": "builtin:addition?split=test", "every": 1, "rows": 2, "samples": 1, "temperature": 0.0}
        turns = ["policy-trainer", *critic, "rollout", *(["reference"] if self.reference else [])]
        return critic | {
            "placement": {"colocate": turns if self.colocated else []},
            "run": {"name": "sim", "steps": self.steps, "seed": 0, "deterministic": self.deterministic}
            | ({} if self.trains else {"evaluate": True}),
            "policy": {"model": model, "dtype": "float32"},
            "data": {
                "train": {"source": "builtin:addition", "max_prompt_tokens": 16},
                "eval": {"heldout": heldout} if self.evaluates else {},
            },
            "reward": {"function": "builtin:exact_match"},
            "sampling": {"temperature": 1.0, "max_new_tokens": 8},
            "staleness": self.staleness,
            "consume": "completion" if self.by_completion else "order",
            "algorithm": algorithm,
            "optimizer": {"name": "adamw", "lr": 3.0e-4},
            "services": services,
            "checkpoint": {"every": self.every, "keep_last": self.keeps},
            "lease": {"lease_s": 4.0, "attempts": 60},
        }


@dataclass(frozen=True)
class Fault:
    """A fault that begins `at_s` seconds after the start."""

    at_s: float


@dataclass(frozen=True)
class Kill(Fault):
    """A kill with SIGKILL, either between two callbacks of the process or, if `operations` is n > 0, at its n-th
    operation after `at_s`. The operations are messages sent, transactions committed, files sealed and tombstones
    written."""

    key: Key
    operations: int = 0

    def __str__(self) -> str:
        when = f" at operation {self.operations} after that" if self.operations else ""
        return f"{self.at_s:7.3f} s  kill {self.key[0]}/{self.key[1]}{when}"


@dataclass(frozen=True)
class Stop(Fault):
    """A stop with SIGSTOP for some seconds, then SIGCONT."""

    key: Key
    for_s: float

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} s  stop {self.key[0]}/{self.key[1]} for {self.for_s:.1f} s"


@dataclass(frozen=True)
class Cut(Fault):
    """A partition: two processes cannot reach each other for some seconds."""

    one: Key
    other: Key
    for_s: float

    def __str__(self) -> str:
        pair = f"{self.one[0]}/{self.one[1]} and {self.other[0]}/{self.other[1]}"
        return f"{self.at_s:7.3f} s  cut between {pair} for {self.for_s:.1f} s"


@dataclass(frozen=True)
class Storm(Fault):
    """A disturbed network: messages are lost, repeated and delayed for some seconds."""

    weather: Weather
    for_s: float

    def __str__(self) -> str:
        each = self.weather
        what = f"lost {each.lost:.0%}, twice {each.twice:.0%}, late {each.late:.0%} by up to {each.late_s:.1f} s"
        return f"{self.at_s:7.3f} s  storm for {self.for_s:.1f} s: {what}"


@dataclass(frozen=True)
class Ghost(Fault):
    """A forged message: a copy of a rollout's next completion, with another process as its sender, arrives first."""

    key: Key

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} s  another process completes the next lease of {self.key[0]}/{self.key[1]}"


@dataclass(frozen=True)
class LastWords(Fault):
    """A late message: a rollout is killed once it has sent its next completion, and that message arrives some seconds
    later.
    """

    key: Key
    after_s: float

    def __str__(self) -> str:
        name = f"{self.key[0]}/{self.key[1]}"
        return f"{self.at_s:7.3f} s  kill {name} after its next completion, which is {self.after_s:.1f} s late"


@dataclass(frozen=True)
class Damage(Fault):
    """A damaged checkpoint of a model: its newest, if there is an older one. The first rank of `service`, which trains
    the model, is killed."""

    service: str = POLICY_WORKER

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} s  damage the newest of several checkpoints and kill {self.service}/0"


@dataclass(frozen=True)
class Scenario:
    """One run. `seed` also decides delays and ids."""

    seed: int
    size: Size
    faults: tuple[Fault, ...]
    drains: bool = True
    """Whether the world continues after the last step until every process has exited."""

    def smaller(self) -> Iterator[Scenario]:
        """Yield copies of this scenario with one part removed: first faults, then services, then steps."""
        for index in range(len(self.faults)):
            yield replace(self, faults=self.faults[:index] + self.faults[index + 1 :])
        for index, fault in enumerate(self.faults):
            if isinstance(fault, Storm):
                for name in ("lost", "twice", "late"):
                    if getattr(fault.weather, name):
                        calmer = replace(fault, weather=replace(fault.weather, **{name: 0.0}))
                        yield replace(self, faults=(*self.faults[:index], calmer, *self.faults[index + 1 :]))
        size = self.size
        for other in (
            replace(size, reference=False),
            replace(size, critic=False),
            replace(size, rollouts=1),
            replace(size, ranks=1),
            replace(size, by_completion=False),
            replace(size, colocated=False),
            replace(size, evaluates=False),
            replace(size, staleness=0),
            replace(size, block=1),
            replace(size, tasks=1, block=1),
            replace(size, steps=max(size.steps - 1, 1)),
        ):
            if other != size:
                plan = other.plan()
                yield replace(self, size=other, faults=tuple(each for each in self.faults if _concerns(each, plan)))

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.size}", *map(str, self.faults)]
        return "\n  ".join(lines)


def _concerns(fault: Fault, plan: list[Key]) -> bool:
    match fault:
        case Kill() | Stop() | Ghost() | LastWords():
            return fault.key in plan
        case Cut():
            return fault.one in plan and fault.other in plan
        case Damage():
            return (fault.service, 0) in plan
        case _:
            return True


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = Random(f"scenario {seed}")
    deterministic = rng.random() < 0.3
    tasks = rng.choice((1, 1, 2, 2, 3))
    size = Size(
        steps=rng.choice((1, 1, 1, 2, 2, 3)),
        tasks=tasks,
        block=rng.choice([each for each in (1, 2, 3) if tasks % each == 0]),
        staleness=rng.choice((0, 1, 1, 2)),
        rollouts=rng.choice((1, 1, 2)),
        ranks=rng.choice((1, 1, 1, 2)) if tasks > 1 else 1,
        every=rng.choice((1, 2)),
        keeps=rng.choice((1, 2)),
        reference=rng.random() < 0.3,
        deterministic=deterministic,
        by_completion=not deterministic and rng.random() < 0.2,
        evaluates=rng.random() < 0.2,
        colocated=rng.random() < 0.25,
    )
    if size.evaluates and seed % 5 == 0:  # not drawn, so that other seeds keep their scenarios
        size = replace(size, trains=False)
    elif seed % 3 == 0:
        size = replace(size, critic=True)
    if size.colocated:
        size = replace(size, staleness=0)  # The engine cannot run ahead of a trainer that takes the engine's memory.
    plan = size.plan()
    likely = [*plan, *[("scheduler", 0), ("batch-store", 0)] * 2]
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        at_s = round(rng.uniform(0.0, FAULTS_UNTIL_S), 3)
        kind = rng.random()
        if kind < 0.2:
            faults.append(Kill(at_s, rng.choice(plan)))
        elif kind < 0.52:
            faults.append(Kill(at_s, rng.choice(likely), rng.randrange(1, 25)))
        elif kind < 0.57:
            faults.append(Stop(at_s, rng.choice(plan), round(rng.uniform(0.2, 8.0), 2)))
        elif kind < 0.64:
            one, other = rng.sample(plan, 2)
            faults.append(Cut(at_s, one, other, round(rng.uniform(0.2, 6.0), 2)))
        elif kind < 0.7:
            faults.append(Ghost(at_s, ("rollout", 0)))
        elif kind < 0.74:
            faults.append(Damage(at_s, rng.choice(size.workers) if size.critic else POLICY_WORKER))
        elif kind < 0.8:
            faults.append(LastWords(at_s, ("rollout", 0), round(rng.uniform(0.3, 3.0), 2)))
        else:
            weather = Weather(rng.choice((0.0, 0.1, 0.3)), rng.choice((0.0, 0.3)), rng.choice((0.0, 0.3)))
            faults.append(Storm(at_s, weather, round(rng.uniform(0.5, 6.0), 2)))
    if rng.random() < 0.15:  # A producer can return after its lease has ended and the store has forgotten its put.
        at_s = round(rng.uniform(0.6, 1.4), 3)
        faults.append(Stop(at_s, ("rollout", 0), round(rng.uniform(5.0, 7.5), 2)))
        faults.append(Kill(round(at_s + rng.uniform(4.5, 7.0), 3), ("batch-store", 0)))
    faults.sort(key=lambda fault: fault.at_s)
    return Scenario(seed, size, tuple(faults), drains=rng.random() < 0.2)
