"""Detects work that is held up, from the rows of metrics.jsonl (`staleness`, `trainer_starved`) and from telemetry.

Bounds are pairs `(begins, ends)`, as in `learning`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from services.monitor.warnings.episodes import Sighting
from services.monitor.warnings.facts import Facts
from services.monitor.warnings.history import RowHistory, median
from services.monitor.warnings.live import Live
from shared.topology.fields import format_size

Lasting = Collection[str]

ROWS = 20
"""Number of rows over which waiting times are summed."""
STARTING_ROWS = 2
"""Number of first rows that are not counted, because they include the waits at the start of the run."""
WAITING = 0.8, 0.65
"""Fraction of the steps' time that the trainer spends waiting for a batch. Where rollouts share the processors with the
trainer, it is up to 0.72 in healthy runs."""

DROPPED_STALE = 0.2, 0.1
"""Fraction of the checked tasks that were dropped because of their age (`consume: completion`). Their samples are
wasted."""
LAG = 0.3, 0.2
"""Mean |log-prob of the trainer - log-prob of the engine| in nats over tokens of earlier versions. Healthy runs show
0.02 to 0.07. An importance weight of exp(0.3) is beyond a clip range of 0.2."""
LAG_CLIPPED = 0.2, 0.15
"""Fraction of tokens that are clipped by a token-level clip range of 0.2; in healthy runs, it is 0.01 to 0.05."""
EFFECTIVE = 0.5, 0.6
"""Effective sample size of the importance weights, divided by the number of tokens. At 0.5, half of the samples are
lost."""
AT_BOUND = 0.9
"""If at least this fraction of recent steps contain a token of the maximum staleness, samples count as always that
old."""

IDLE = 0.8, 0.7
"""Fraction of the time during which rollouts sample nothing, while the trainer hardly ever waits for them."""
TRAINER_BUSY = 0.1
"""If the trainer spends at most this fraction of its time waiting, it is the trainer that limits the pace."""
BLOCKS, BLOCKS_S = 10, 60.0
"""Minimum number of blocks, and the time, in seconds, that they must span."""

FULL = 0.9, 0.8
"""Fraction of a store's limit that is in use. At 0.8, the scheduler orders early checkpoints, which free room."""
SPILLED = 0.25, 0.1
"""Fraction of a store's data that is on disk."""
REFUSED_PUTS = 5.0, 1.0
"""Number of puts refused for lack of room over the latest reports. Admission reserves room, so healthy runs have
none."""
FULL_REPORTS = 15
"""Number of reports (one a second) whose median is compared with the bounds."""

SLOW_SHARE = 0.5, 0.4
"""Reward time as a fraction of the sum of sampling time and reward time. The two overlap, so above 0.5, the rewards
limit the pace."""
SLOW_S = 0.5
"""Reward time of a block, in seconds, below which faster rewards are not worthwhile."""
SCORED = 5
"""Number of blocks whose median times are compared."""
FAILING = 0.1, 0.05
"""Fraction of samples without a reward. Lost samples bias training if they have something in common, such as their
length."""
FAILING_SAMPLES = 64
"""Minimum number of latest samples over which that fraction is computed."""

EXHAUSTED_S = 24 * 3600.0
"""A warning is given if the machine will run out of memory within this many seconds and the end of the run is
unknown."""


def staleness(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    if facts.by_completion:
        checked, stale = history.last("rollout/tasks_checked", ROWS), history.last("rollout/tasks_stale", ROWS)
        share = sum(stale) / sum(checked) if sum(checked) else 0.0
        if share >= DROPPED_STALE[bool(lasting)]:
            yield Sighting(
                f"{share:.0%} of the checked tasks were dropped because they were over {facts.staleness} versions old",
                f"raise staleness (now {facts.staleness}), or lower services.rollout.instances (now {facts.instances})",
            )
            return
    oldest, clipped = history.last("rollout/staleness_max", ROWS), history.last("policy/clip_fraction", ROWS)
    if not (facts.sampled and facts.staleness and oldest and clipped):
        return
    at_bound = sum(value >= facts.staleness for value in oldest) / len(oldest)
    lag, effective = (history.last(f"rollout/{name}", ROWS) for name in ("logprob_mismatch_lag", "is_eff_sample_size"))
    if at_bound < AT_BOUND:
        return
    if effective and median(effective) < EFFECTIVE[bool(lasting)]:
        harm = f"the importance weights leave {median(effective):.0%} of the tokens (effective sample size)"
    elif lag and median(lag) >= LAG[bool(lasting)]:
        harm = f"the log-probs have moved by {median(lag):.2g} nats since sampling"
    elif facts.clips_tokens and median(clipped) >= LAG_CLIPPED[bool(lasting)]:
        harm = f"{median(clipped):.0%} of the tokens are clipped"
    else:
        return
    yield Sighting(
        f"in {at_bound:.0%} of the steps the oldest samples are {facts.staleness} versions old, the most that "
        f"`staleness` allows, and {harm}",
        f"lower staleness (now {facts.staleness}) or optimizer.lr (now {facts.lr:.1e})",
    )


def trainer_starved(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    waits, steps = history.last("time/wait_batch", ROWS), history.last("time/step", ROWS)
    if not (waits and steps) or history.rows < ROWS + STARTING_ROWS or facts.alternates:
        return
    share = sum(waits) / max(sum(steps), 1e-9)
    typical = median(wait / max(step, 1e-9) for wait, step in zip(waits, steps, strict=True))
    if min(share, typical) < WAITING[bool(lasting)]:
        return
    yield Sighting(
        f"the trainer has spent {share:.0%} of the time of the last {ROWS} steps waiting for samples "
        f"({median(steps):.2g} s a step)",
        f"raise services.rollout.instances (now {facts.instances}), services.rollout.threads or gpus, or "
        f"services.rollout.block_tasks; if both sides take turns idling, raise staleness (now {facts.staleness})",
    )


def rollouts_starved(live: Live, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    blocks = list(live.blocks)
    if facts.alternates or not facts.sampled or len(blocks) < BLOCKS or live.wait_share is None:
        return
    span_s = live.now - blocks[0].at
    busy_s = sum(block.seconds for block in blocks[1:])
    if span_s < BLOCKS_S or live.wait_share > TRAINER_BUSY:
        return
    idle = 1.0 - busy_s / (span_s * facts.instances)
    if idle < IDLE[bool(lasting)]:
        return
    fewer = (
        f"lower services.rollout.instances (now {facts.instances})"
        if facts.instances > 1
        else "give rollouts fewer processors"
    )
    yield Sighting(
        f"rollouts have been idle for {idle:.0%} of the last {span_s:.0f} s, waiting for the trainer, which itself "
        f"spends {live.wait_share:.0%} of its time waiting",
        f"{fewer}, and give the trainer more processors (services.policy-trainer.threads, workers or gpus); more "
        "staleness does not help",
    )


def store_full(live: Live, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    for name, reports in live.stores.items():
        if len(reports) < FULL_REPORTS:
            continue
        share = median(report.held / max(report.limit, 1.0) for report in reports)
        spilled = median(report.spilled / max(report.held, 1.0) for report in reports)
        last, refused = reports[-1], reports[-1].refused - reports[0].refused
        on = name in lasting
        if share < FULL[on] and spilled < SPILLED[on] and refused < REFUSED_PUTS[on]:
            continue
        holds = f"{name} holds {share:.0%} of its {format_size(int(last.limit))}"
        if refused:
            seen = f"{holds}; {refused:.0f} puts were refused (BUSY) in the last {len(reports)} s, and are waiting"
        elif spilled >= SPILLED[on]:
            seen = f"{spilled:.0%} of the {format_size(int(last.held))} in {name} is on disk and must be read back"
        else:
            seen = f"{holds}; beyond the limit, puts are refused (BUSY) and fewer tasks are admitted, so rollouts wait"
        yield Sighting(
            seen,
            "raise services.batch-store.memory, lower checkpoint.every, or free tasks at once (gc.after: commit)",
            about=name,
        )


def memory_trend(live: Live, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    if live.available_bytes is None:
        return
    for name, trend in live.memory.items():
        growth = trend.growth() if name in facts.local else None
        if growth is None:
            continue
        left_s = live.available_bytes / growth.bytes_per_s
        run_s = live.remaining_s
        if left_s > (EXHAUSTED_S if run_s is None else run_s) * (2.0 if name in lasting else 1.0):
            continue
        yield Sighting(
            f"the memory of {name} has grown by {format_size(int(growth.bytes_per_s * 3600))} an hour for "
            f"{growth.span_s / 60:.0f} minutes, to {format_size(int(growth.last_bytes))}; at this rate the "
            f"{format_size(int(live.available_bytes))} that this machine has left will be used up in "
            f"{_duration(left_s)}" + (f", and the run ends in {_duration(run_s)}" if run_s is not None else ""),
            f"look for data that your code keeps, or restart the service now and then (ctl restart {name}), which "
            "does not lose any data",
            about=name,
        )


def reward_slow(live: Live, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    blocks, scored = list(live.blocks)[-SCORED:], list(live.scored)[-SCORED:]
    if min(len(blocks), len(scored)) < SCORED:
        return
    sampling_s, reward_s = median(block.seconds for block in blocks), median(block.seconds for block in scored)
    share = reward_s / max(reward_s + sampling_s, 1e-9)
    if reward_s < SLOW_S or share < SLOW_SHARE[bool(lasting)]:
        return
    yield Sighting(
        f"for each block of samples, rewards take {reward_s:.2g} s and sampling takes {sampling_s:.2g} s (rewards take "
        f"{share:.0%} of the sum)",
        f"raise reward.processes (now {facts.reward_processes}), or make reward.function async if it waits for "
        "a server",
    )


def reward_failing(live: Live, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    samples = failed = 0.0
    for scored in reversed(live.scored):
        samples, failed = samples + scored.samples, failed + scored.failed
        if samples >= FAILING_SAMPLES:
            break
    if samples < FAILING_SAMPLES or failed / samples < FAILING[bool(lasting)]:
        return
    yield Sighting(
        f"{failed:.0f} of the last {samples:.0f} samples have no reward; the most recent one failed because: "
        f"{live.last_failure}",
        "fix reward.function (a traceback is in the rollout's log), or raise reward.timeout_s or reward.memory",
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"
