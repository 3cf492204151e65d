"""Compares the cluster with TRL's GRPOTrainer on the same GRPO work, in samples/s. `peers/trl_grpo.py` lists the
settings that are the same on both sides and those that differ.

TRL runs with the settings that a recorded sweep found fastest (`peer_sweep`, `peers/trl_sweep.json`). TRL alternates
between generation and training. If it generates at most the samples of one step at a time, it is on policy, and our row
at staleness 0 is the like-for-like comparison. If it generates the samples of two steps at a time, every second step
uses samples that are one update stale. Our runs at staleness 1 are compared with the fastest of all settings, and those
at staleness 0 with the fastest one that is on policy. At staleness 0, where our services take turns, trainer and
reference have as many threads as TRL's sweep may use, all CPUs, and each CPU has a rollout.

"others'" is the CPU time that neither this program nor the run used (steal included), in cores over the whole run.
If it is much above zero, other programs distort the figures, most of all TRL's, whose threads busy-wait.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shared.data import open_source
from tests.bench.cluster_run import MODEL, ROOT, last_line, measured_cores, run_cluster
from tests.bench.peer_sweep import Axes, Measured, recorded_best, save, search, text
from tests.bench.turns import by_turns, heading, order_line, ratios, spread, versions

PEER = Path(__file__).parent / "peers" / "trl_grpo.py"
PEER_ENVIRONMENT = ROOT / ".venv-trl"
PEER_PYTHON = PEER_ENVIRONMENT / "bin" / "python"
RECORD = Path(__file__).parent / "peers" / "trl_sweep.json"
GROUP_SIZE = 8
COOL_DOWN = 3
"""Steps that run after the last measured one. Sampling runs up to (staleness + 1) steps ahead and stops before the end
of a run, so the last steps have less to do."""
STALENESS = (1, 0)
START_MICRO_BATCHES = (8, 32, 128, 512)
"""The micro-batches, up to a whole step, with which a sweep starts."""
KEEP_LENGTHS = 1e-7
"""A learning rate so low that the lengths of a random model's answers do not change."""


@dataclass(frozen=True)
class Settings:
    """TRL's settings: torch threads, samples per forward and backward pass, and samples generated together."""

    threads: int
    micro_batch: int
    generation_batch: int


@dataclass(frozen=True)
class Work:
    """Steps of `tasks` groups with answers of up to `tokens` tokens. If `trained` is true, the quickstart's model and
    learning rate are used; otherwise, a random model of the same shape, whose answers end after about 64 tokens, is
    used."""

    name: str
    tokens: int
    tasks: int
    steps: int
    warm_up: int
    trained: bool
    goals: Mapping[int, float] = field(default_factory=dict, hash=False)
    """The ratio to TRL that is aimed at, for each staleness."""

    @property
    def samples(self) -> int:
        return self.tasks * GROUP_SIZE

    def settings(self, model: Path) -> list[str]:
        """Return the overrides with which the quickstart does this work."""
        learning = [] if self.trained else [f"optimizer.lr={KEEP_LENGTHS}"]
        sizes = [f"algorithm.tasks_per_step={self.tasks}", f"sampling.max_new_tokens={self.tokens}"]
        return [*sizes, f"policy.model={model}", *learning]


QUICKSTART = Work("quickstart", 8, 64, steps=60, warm_up=10, trained=True, goals={1: 5.5, 0: 3.5})
LONG = Work("answers of up to 128 tokens", 128, 16, steps=12, warm_up=4, trained=False, goals={1: 4.2, 0: 2.7})
SHORT = Work("answers of up to 8 tokens", 8, 64, steps=30, warm_up=4, trained=False, goals={1: 2.5, 0: 1.5})


@dataclass(frozen=True)
class Side:
    """Figures of one run: samples per second of wall-clock time after the warm-up, means of the last steps, and CPU
    time in cores."""

    samples_per_s: float
    reward: float
    length: float
    own_cores: float
    others_cores: float


def measure_cluster(work: Work, model: Path, staleness: int, limit_s: float, more: Sequence[str] = ()) -> Side:
    """Measure one run from the row of the last warm-up step to the row of step `work.steps`, with `more` settings.
    Raises BenchError.
    """
    settings = [f"staleness={staleness}", *work.settings(model)]
    with tempfile.TemporaryDirectory(prefix="bench-") as name, measured_cores() as cores:
        arrivals = run_cluster(work.steps + COOL_DOWN, Path(name), limit_s, settings=[*settings, *more])[: work.steps]
    rows = [arrival.row for arrival in arrivals]
    seconds = arrivals[-1].at_s - arrivals[work.warm_up - 1].at_s
    samples = sum(work.samples - row["rollout/samples_failed"] for row in rows[work.warm_up :])
    return Side(
        samples_per_s=samples / seconds,
        reward=statistics.fmean(row["reward/mean"] for row in rows[-10:]),
        length=statistics.fmean(row["rollout/length_mean"] for row in rows[-10:]),
        own_cores=cores.own,
        others_cores=cores.others,
    )


def all_cpus(work: Work) -> list[str]:
    """Return the overrides with which services that take turns use all CPUs."""
    cpus = len(os.sched_getaffinity(0))
    rollouts = max(each for each in range(1, cpus + 1) if work.tasks % each == 0)
    settings = [f"services.{service}.threads={cpus}" for service in ("policy-trainer", "reference")]
    return [
        *settings,
        f"services.rollout.instances={rollouts}",
        f"services.rollout.block_tasks={work.tasks // rollouts}",
    ]


def measure_trl(
    work: Work,
    model: Path,
    settings: Settings,
    limit_s: float,
    *,
    python: Path = PEER_PYTHON,
    options: Sequence[str] = (),
) -> Side:
    """Measure one run of GRPOTrainer, with further `options` of `trl_grpo`. Raises BenchError if the run fails or
    exceeds `limit_s`."""
    # A cycle is the number of steps per generation; the run has a whole number of cycles.
    cycle = max(settings.generation_batch // work.samples, 1)
    command = [str(python), str(PEER), *options, "--model", str(model), "--samples", str(work.samples)]
    command += ["--steps", str(work.steps // cycle * cycle), "--warm-up", str(-(-work.warm_up // cycle) * cycle)]
    command += ["--threads", str(settings.threads), "--micro-batch", str(settings.micro_batch)]
    command += ["--generation-batch", str(settings.generation_batch), "--max-new-tokens", str(work.tokens)]
    if not work.trained:
        command += ["--learning-rate", str(KEEP_LENGTHS)]
    with tempfile.TemporaryDirectory(prefix="bench-") as name, measured_cores() as cores:
        rows = Path(name) / "train.jsonl"
        source = open_source("builtin:addition", where="against_trl")
        rows.write_text("".join(json.dumps(source.row(index)) + "\n" for index in range(len(source))))
        result = last_line([*command, "--rows", str(rows)], "TRL", limit_s)
    return Side(
        samples_per_s=result["samples_per_s"],
        reward=statistics.fmean(result["reward_mean"][-10:]),
        length=statistics.fmean(result["length_mean"][-10:]),
        own_cores=cores.own,
        others_cores=cores.others,
    )


# ------------------------------------------------------------------------------------------------------- the sweep


def axes(work: Work, cores: int) -> Axes:
    """Return the limits of TRL's settings. A generation batch is at most one update stale, and at least one group."""
    return {
        "threads": (1, cores),
        "micro_batch": (2, work.samples),
        "generation_batch": (GROUP_SIZE, (max(STALENESS) + 1) * work.samples),
    }


def accepted(settings: Settings) -> bool:
    """Return whether TRL accepts the settings."""
    return settings.generation_batch % settings.micro_batch == 0


def on_time(work: Work, settings: Settings, staleness: int) -> bool:
    """Return whether TRL accepts the settings and every sample is at most `staleness` updates old."""
    return accepted(settings) and settings.generation_batch <= (staleness + 1) * work.samples


def sweep(work: Work, cores: int, measure: Callable[[Settings], float], **options: Any) -> Measured[Settings]:
    """Find TRL's fastest settings for each staleness; return everything measured. `options` are those of `search`."""
    start = [Settings(cores, each, work.samples) for each in START_MICRO_BATCHES if each <= work.samples]
    measured: Measured[Settings] = {}
    for staleness in STALENESS:
        allowed = partial(on_time, work, staleness=staleness)
        measured = search(start, axes(work, cores), measure, allowed=allowed, measured=measured, **options)
    return measured


def best_of(work: Work, staleness: int) -> tuple[Settings, str]:
    """Return the recorded best settings that are at most `staleness` updates stale, and a line about them.

    Raises BenchError.
    """
    limits = axes(work, len(os.sched_getaffinity(0)))
    return recorded_best(RECORD, work.name, Settings, limits, partial(on_time, work, staleness=staleness))


# ---------------------------------------------------------------------------------------------------- the commands

FORM = "{:<40}{:>24}{:>9}{:>9}{:>11}{:>9}"
COLUMNS = ("workload", "tokens per answer", "staleness", "rlbus", "TRL", "ratio", "goal")


def run_sweep(work: Work, cores: int, limit_s: float) -> None:
    """Sweep `work` and add the result to RECORD."""
    print(f"\n{work.name}: TRL, samples/s", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = model_of(work, Path(name))
        measured = sweep(
            work,
            cores,
            lambda each: measure_trl(work, model, each, limit_s).samples_per_s,
            show=lambda each, run: print(
                f"{text(each):<62}{run.rate:>9.1f}, others' cores {run.others_cores:.2f}", flush=True
            ),
        )
    shape = {"samples_of_a_step": work.samples, "steps": work.steps, "warm_up": work.warm_up}
    save(RECORD, work.name, measured, peer_versions(), unit="samples/s", **shape)
    for staleness in STALENESS:
        print(f"at staleness {staleness} or less: {best_of(work, staleness)[1]}")


def peer_versions() -> str:
    return versions(("trl", "torch", "transformers"), PEER_ENVIRONMENT)


def model_of(work: Work, folder: Path) -> Path:
    """Return the model of `work`; a random one is created in `folder`."""
    if work.trained:
        return MODEL
    from tests.bench.random_model import save_random  # This imports torch, which only the compared programs need.

    save_random(folder / "model")
    return folder / "model"


def compare(work: Work, turns: int, limit_s: float, only: str | None = None) -> None:
    """Print the table of `work`: the cluster at each staleness, TRL, and the ratios. `only` restricts the comparison to
    cluster or trl.

    Raises BenchError.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = model_of(work, Path(name))
        ours = {
            f"rlbus, staleness {each}": partial(
                measure_cluster, work, model, each, limit_s, () if each else all_cpus(work)
            )
            for each in STALENESS
        }
        peers: dict[int, str] = {}
        theirs: dict[str, Callable[[], Side]] = {}
        for staleness in STALENESS if only != "cluster" else ():
            settings, line = best_of(work, staleness)
            stale = "on policy" if on_time(work, settings, 0) else f"generating {settings.generation_batch}"
            peers[staleness] = f"TRL GRPOTrainer, {stale}"
            if peers[staleness] not in theirs:
                theirs[peers[staleness]] = partial(measure_trl, work, model, settings, limit_s)
                print(f"{peers[staleness]}: {line}")
        sides: dict[str, Callable[[], Side]] = {**({} if only == "trl" else ours), **theirs}
        software = f"{versions(('torch', 'transformers'))}; TRL: {peer_versions()}" if theirs else ""
        print(
            f"\n{work.name}: {work.tasks} tasks of {GROUP_SIZE} samples a step, {work.steps} steps of which "
            f"{work.warm_up} warm up"
        )
        print(heading(software))
        print(order_line(sides, turns))
        print(FORM.format("samples/s", "wall clock", "reward", "tokens", "own cores", "others'"), flush=True)
        results = by_turns(sides, turns)
    for side, runs in results.items():
        print(row(side, runs), flush=True)
    if only is None:
        print(
            "\n".join(
                table(work, {each: (results[f"rlbus, staleness {each}"], results[peers[each]]) for each in STALENESS})
            )
        )


def table(work: Work, results: Mapping[int, tuple[list[Side], list[Side]]]) -> Iterator[str]:
    """Yield the lines of the table of ratios, from our runs and TRL's at each staleness."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for staleness, sides in results.items():
        mine, theirs = ([each.samples_per_s for each in runs] for runs in sides)
        cells = (
            work.name,
            f"{statistics.fmean(each.length for each in sides[0]):.1f}",
            f"{staleness}",
            spread(mine).text(".0f"),
            spread(theirs).text(".0f"),
            ratios(mine, theirs).text(),
            f"{work.goals[staleness]:g}" if staleness in work.goals else "",
        )
        yield f"| {' | '.join(cells)} |"


def row(side: str, runs: list[Side]) -> str:
    """Return a line of the table: the median rate with its range, the means of the other figures, and the maximum CPU
    time of other programs."""
    return FORM.format(
        side,
        spread(each.samples_per_s for each in runs).text(".0f"),
        f"{statistics.fmean(each.reward for each in runs):.3f}",
        f"{statistics.fmean(each.length for each in runs):.2f}",
        f"{statistics.fmean(each.own_cores for each in runs):.2f}",
        f"{max(each.others_cores for each in runs):.2f}",
    )
