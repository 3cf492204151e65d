"""Detects runs that do not learn, or that learn the wrong thing, from the rows of metrics.jsonl.

Each detector is a pure function of the history: `detector(history, facts, lasting)` yields its sightings. `lasting`
names the subjects of the detector's ongoing episodes. Bounds are pairs `(begins, ends)`; the second bound applies to
the subjects in `lasting`. Where a bound is not a convention of the field, its description gives the reason and the
values of healthy runs (`tests/data/warnings/healthy`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from services.monitor.warnings.episodes import Sighting
from services.monitor.warnings.facts import Facts
from services.monitor.warnings.history import FIRST, RowHistory, SetResult, error_of_median, median, noise

Lasting = Collection[str]

RECENT = 10
"""The present level of a metric is the median of this many latest rows, so that no single step is decisive."""
FEW = 5
"""Like `RECENT`, for failures that destroy a policy within a few steps."""

ZERO_VARIANCE = 0.75, 0.6
"""Fraction of groups with equal rewards. At 0.75, a step learns from only a quarter of its samples, and its gradient
noise has doubled. Healthy runs are below 0.5. DAPO (arXiv 2503.14476, section 3.2) filters such groups for this
reason."""
ZERO_VARIANCE_RISE, ZERO_VARIANCE_FLOOR = (0.3, 0.2), (0.5, 0.4)
"""Rise of this fraction above its first values, and the minimum fraction at which such a rise counts. In healthy runs,
it rises by at most 0.1."""
SOLVED_RISE = 0.5
"""If the mean reward has risen by this many standard deviations, equal rewards mean that tasks have become too easy."""

FLAT_ROWS, FLAT_ROWS_UNEXPLAINED = 30, 100
"""Number of rows after which a reward that has not risen counts as flat, with a known cause and without one."""
FLAT_ERRORS = 2.0, 4.0
"""A reward that has risen above its first rows by at most this many standard errors counts as flat."""
CONSTANT_STD = 1e-6
ZERO_GRADIENT = 1e-7
STILL_KL, STILL_CLIPPED = 1e-4, 1e-4
"""KL to the reference and clip fraction below which the policy counts as not having moved. In healthy runs, they
are 0.2 and 0.02."""
CLIPPED = 0.5

FALL = 0.5, 0.3
"""Fall of the mean reward from its best level, in standard deviations of a batch's rewards. For rewards of 0 and 1 with
a mean of 0.6, the first bound is a fall to 0.36."""
FALL_ERRORS = 4.0

ENTROPY_LEFT = 0.1, 0.2
"""Fraction of the initial entropy that is left. A healthy run that solves its tasks keeps 0.3 over 200 steps."""
ENTROPY_DROP, ENTROPY_DROP_ROWS = 0.25, 20
"""Fraction of the entropy that is left after 20 steps, in a collapse that has just begun; healthy runs keep 0.8."""
LOW_ENTROPY = 0.02
"""A policy whose initial entropy, in nats, is below this is deterministic from the start, so there is nothing that can
collapse."""

KL_LEVEL = 2.0, 1.0
"""Mean KL per token to the reference, in nats. It begins at 0. Healthy runs stay below 0.7, large ones below 0.1."""
KL_JUMP, KL_JUMP_FLOOR, KL_BEFORE = 10.0, 0.3, 20
"""A policy whose KL is ten times its level of 20 rows earlier, and at least 0.3 nats, has left the reference."""

MISMATCH_LEVEL = 0.1, 0.05
"""Mean |log-prob of the trainer - log-prob of the engine| in nats, over tokens of the trained version. Engines with
bfloat16 weights show 0.01 to 0.02 (slime, verl), float32 engines 1e-6. At 0.1, importance weights are off by 10 %."""
MISMATCH_RISE, MISMATCH_FLOOR = 2.5, 0.02
"""Ratio of the mismatch to its first values, and the minimum mismatch at which this ratio counts. Collapses follow a
rise from 0.01 to 0.04 within about ten steps (arXiv 2510.26788, reports on slime and open-instruct)."""

TRUNCATED = 0.3, 0.2
"""Fraction of samples cut at the length limit."""
TRUNCATED_RISE, TRUNCATED_TIMES = 0.15, 3.0
"""In most cases, a fraction that has tripled and is at least 0.15 keeps rising, even if it is still below
`TRUNCATED`."""

LENGTH_ROWS = 40
LENGTH_GROWTH = 1.5, 1.25
"""Growth of the mean length over 40 rows."""
LENGTH_REWARDED = 0.5
"""Correlation of length and reward within groups at which length explains a quarter of the reward's variance. Where
answers are checked, longer answers are more often wrong."""

GRADIENT_TIMES = 10.0, 5.0
"""If the ratio of the gradient norm to its initial level is at least this, the gradient has exploded. Healthy runs stay
below 4."""
GRADIENT_OVER_CLIP = 5.0
SKIPPED_UPDATES = 1.0

SMALL_LR = 1e-10
"""Learning rate below which AdamW leaves float32 weights of a usual size unchanged. AdamW changes each weight by about
the learning rate per step."""

FALL_OF_ACCURACY, ACCURACY_ERRORS = 0.03, 3.0
"""Minimum fall of an evaluation's mean reward: absolute, and in standard errors of a proportion of the set's rows."""

UNEXPLAINED_ROWS = 20
"""A critic whose explained variance is below 0 in this many consecutive rows is worse than one constant value for all
tokens. The explained variance of a critic that can tell little fluctuates around 0, so it changes its sign: in a
healthy run whose rewards depend mostly on the sampled tokens, it was below 0 in at most four consecutive rows."""


def zero_variance(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    shares, spread = history.last("rollout/zero_variance_fraction", RECENT), history.last("reward/std", RECENT)
    rewards = history.last("reward/mean", RECENT)
    if not (facts.sampled and facts.groups and shares and spread and rewards):
        return
    if median(spread) < CONSTANT_STD and not lasting:
        return  # `reward_flat` reports rewards that are all equal from the start
    share, before = median(shares), median(history.first("rollout/zero_variance_fraction"))
    rising = share >= max(ZERO_VARIANCE_FLOOR[bool(lasting)], before + ZERO_VARIANCE_RISE[bool(lasting)])
    if share < ZERO_VARIANCE[bool(lasting)] and not rising:
        return
    first, now = median(history.first("reward/mean")), median(rewards)
    if now - first >= SOLVED_RISE * median(history.first("reward/std")):
        why, remedy = "the tasks have become too easy", "add harder rows to data.train.source"
    else:
        why = "the policy solves either none or all of these tasks"
        remedy = "add rows of different difficulty to data.train.source, or raise algorithm.group_size"
    if not facts.filters:
        remedy += ", or fill steps with other tasks (algorithm.filter_zero_variance)"
    yield Sighting(
        f"{share:.0%} of the groups have equal rewards, and no advantage (median of {RECENT} steps; {before:.0%} at "
        f"the start), with a mean reward of {now:.3g}: {why}",
        remedy,
    )


def reward_flat(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    spread, rewards = history.last("reward/std", RECENT), history.last("reward/mean", RECENT)
    if not (facts.sampled and facts.rewarded and spread and rewards):
        return
    if max(spread) < CONSTANT_STD and max(rewards) - min(rewards) < CONSTANT_STD:
        text = f"every sample of the last {RECENT} steps has the reward {rewards[-1]:.3g}, so all advantages are 0"
        best, size = max(history.first("reward/mean")), max(history.first("reward/std"))
        if best - rewards[-1] > FALL[0] * size:
            yield Sighting(
                f"{text}; it was {best:.3g} in the first {FIRST} steps, so the policy has been destroyed since",
                f"lower optimizer.lr (now {facts.lr:.1e}) or raise optimizer.warmup_steps (now {facts.warmup_steps}), "
                "and start again",
            )
        else:
            yield Sighting(
                text, "make reward.function tell good answers from bad ones, or use other rows for data.train.source"
            )
        return
    longer, trained = history.last("reward/mean", FLAT_ROWS), history.rows - facts.critic_warmup_steps
    if not longer or trained < FLAT_ROWS:
        return
    first, now = median(history.first("reward/mean")), median(rewards)
    if now - first > FLAT_ERRORS[bool(lasting)] * error_of_median(longer, FIRST) * 2**0.5:
        return
    cause = _why_flat(history, facts)
    if cause is None:
        if trained < FLAT_ROWS_UNEXPLAINED:
            return
        cause = Sighting(
            "no cause is visible in the metrics",
            "read samples, check that reward.function rewards what you want, and try a different optimizer.lr",
        )
    yield Sighting(
        f"the reward is flat: {first:.3g} in the first {FIRST} steps, {now:.3g} in the last {RECENT} of "
        f"{history.rows}; {cause.text}",
        cause.remedy,
    )


def _why_flat(history: RowHistory, facts: Facts) -> Sighting | None:
    """Return the most likely cause of a flat reward, or None if the metrics show none."""

    def level(name: str) -> float | None:
        values = history.last(name, RECENT)
        return median(values) if values else None

    lr, norm, skipped = level("policy/lr"), level("policy/grad_norm"), level("policy/updates_skipped")
    alike, cut = level("rollout/zero_variance_fraction"), level("rollout/truncated_fraction")
    clipped, kl = level("policy/clip_fraction"), level("loss/kl")
    if skipped:
        return Sighting("updates are skipped", "see the bad steps in the trainer's log, and run.on_bad_step")
    if lr is not None and lr <= SMALL_LR:
        return Sighting(f"the learning rate is {lr:.1e}", f"raise optimizer.lr (now {facts.lr:.1e})")
    if norm is not None and norm <= ZERO_GRADIENT:
        return Sighting(f"the gradient norm is {norm:.1e}", "check that rewards differ within groups (reward.function)")
    if alike is not None and facts.groups and alike >= ZERO_VARIANCE[1]:
        return Sighting(
            f"{alike:.0%} of the groups have equal rewards", "change data.train.source, or raise algorithm.group_size"
        )
    if cut is not None and cut >= TRUNCATED[0]:
        return Sighting(
            f"{cut:.0%} of the samples are cut at the length limit",
            f"raise sampling.max_new_tokens (now {facts.max_new_tokens})",
        )
    if clipped is not None and facts.clips_tokens and clipped >= CLIPPED:
        return Sighting(f"{clipped:.0%} of the tokens are clipped", "lower optimizer.lr or staleness")
    parts = _opposed_parts(history)
    if parts is not None:
        up, down = parts
        return Sighting(
            f"parts of the reward disagree: {up} rises while {down} falls", "change the weights of reward.functions"
        )
    if clipped is not None and clipped < STILL_CLIPPED and kl is not None and facts.kl_coef and kl < STILL_KL:
        return Sighting(
            f"the policy has hardly moved: KL {kl:.1e}, clip fraction {clipped:.1e}",
            f"raise optimizer.lr (now {facts.lr:.1e})",
        )
    return None


def _opposed_parts(history: RowHistory) -> tuple[str, str] | None:
    """Return the reward part that has risen most and the one that has fallen most, or None unless there are both."""
    moved: list[tuple[float, str]] = []
    for name in history.names("reward/part/"):
        longer = history.last(name, FLAT_ROWS)
        if longer:
            move = median(longer[-RECENT:]) - median(history.first(name))
            error = error_of_median(longer, FIRST) * 2**0.5
            if abs(move) > FLAT_ERRORS[1] * error:
                moved.append((move, name.removeprefix("reward/part/")))
    if moved and min(moved)[0] < 0 < max(moved)[0]:
        return max(moved)[1], min(moved)[1]
    return None


def reward_falling(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    rewards, spread = history.last("reward/mean", 3 * RECENT), history.last("reward/std", 3 * RECENT)
    if not (facts.sampled and facts.rewarded and rewards and spread):
        return
    longer = next(rewards for count in (60, 50, 40, 30) if (rewards := history.last("reward/mean", count)))
    blocks = [median(longer[at : at + RECENT]) for at in range(0, len(longer) - RECENT, RECENT)]
    best, now = max(blocks), median(rewards[-RECENT:])
    size = max(*history.first("reward/std"), median(spread))
    if (
        best <= now
        or best - now < FALL[bool(lasting)] * size
        or best - now < FALL_ERRORS * error_of_median(longer, RECENT)
    ):
        return
    yield Sighting(
        f"the reward has fallen from {best:.3g} to {now:.3g} within {len(longer)} steps",
        f"lower optimizer.lr (now {facts.lr:.1e}) or raise algorithm.kl.coef (now {facts.kl_coef:g}), and continue "
        "from a checkpoint before the fall",
    )


def entropy_collapse(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    values = history.last("policy/entropy", RECENT)
    if not (facts.sampled and values):
        return
    first, now = median(history.first("policy/entropy")), median(values)
    if first < LOW_ENTROPY:
        return
    before = history.last("policy/entropy", ENTROPY_DROP_ROWS + FEW)
    sudden = bool(before) and median(before[-FEW:]) <= ENTROPY_DROP * median(before[:FEW])
    if now > ENTROPY_LEFT[bool(lasting)] * first and not sudden:
        return
    how = f"{first:.2g} nats at the start"
    if sudden:
        how, now = f"{median(before[:FEW]):.2g} nats {ENTROPY_DROP_ROWS} steps ago", median(before[-FEW:])
    yield Sighting(
        f"the entropy of the policy has collapsed to {now:.2g} nats, from {how}: samples of a task are becoming "
        "identical",
        "raise algorithm.entropy_coef or the upper algorithm.loss.clip (such as [0.2, 0.28]), or lower optimizer.lr",
    )


def kl_blow_up(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    if not facts.kl_coef:
        return
    for name in ("loss/kl", "reward/kl"):
        values = history.last(name, FEW)
        if not values:
            continue
        now, before = median(values), history.last(name, KL_BEFORE + FEW)
        jump = bool(before) and now >= max(KL_JUMP_FLOOR, KL_JUMP * median(before[:KL_BEFORE]))
        if now >= KL_LEVEL[bool(lasting)] or jump:
            yield Sighting(
                f"the KL to the reference is {now:.2g} nats per token ({name}); it was 0 at the start",
                f"lower optimizer.lr (now {facts.lr:.1e}) or raise algorithm.kl.coef (now {facts.kl_coef:g})",
            )
            return


def mismatch(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    name = "rollout/logprob_mismatch_engine"
    values = history.last(name, FEW)
    if not values:
        return
    now, base = median(values), median(history.first(name))
    risen = now >= max(MISMATCH_FLOOR, MISMATCH_RISE * base)
    if now < MISMATCH_LEVEL[bool(lasting)] and not risen:
        return
    yield Sighting(
        f"engine and trainer disagree by {now:.2g} nats per token on tokens from the same weights ({base:.2g} at the "
        "start)",
        "use float32 or float16 for policy.dtype, or remove services.rollout.engine_args that lower the "
        "precision, or mask such tokens (algorithm.loss.ratio_mask)",
    )


def truncation(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    values = history.last("rollout/truncated_fraction", RECENT)
    if not (facts.sampled and values):
        return
    now, first = median(values), median(history.first("rollout/truncated_fraction"))
    rising = now >= max(TRUNCATED_RISE, TRUNCATED_TIMES * first)
    if now < TRUNCATED[bool(lasting)] and not rising:
        return
    yield Sighting(
        f"{now:.0%} of the samples are cut at the length limit (median of {RECENT} steps; {first:.0%} at the start)",
        f"raise sampling.max_new_tokens (now {facts.max_new_tokens}), or do not train on such samples "
        "(algorithm.overlong: mask), or penalise long samples (algorithm.overlong_penalty)",
    )


def length_hacking(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    lengths, rewards = history.last("rollout/length_mean", LENGTH_ROWS), history.last("reward/mean", LENGTH_ROWS)
    if not (facts.sampled and facts.rewarded and lengths and rewards):
        return
    before, now = median(lengths[:RECENT]), median(lengths[-RECENT:])
    if before <= 0 or now < LENGTH_GROWTH[bool(lasting)] * before or now - before < 4 * noise(lengths):
        return
    rise = median(rewards[-RECENT:]) - median(rewards[:RECENT])
    paid = history.last("reward/length_correlation", RECENT)
    text = f"the mean sample length has grown from {before:.4g} to {now:.4g} tokens within {LENGTH_ROWS} steps"
    remedy = "penalise long samples (algorithm.overlong_penalty)"
    if rise <= FLAT_ERRORS[0] * error_of_median(rewards, RECENT) * 2**0.5:
        yield Sighting(
            f"{text} while the reward has not risen ({rise:+.2g})",
            f"{remedy}, or use algorithm.loss.aggregation: dr_grpo, under which length is not rewarded",
        )
    elif paid and median(paid) >= LENGTH_REWARDED:
        yield Sighting(
            f"{text}, and the reward favours length: within groups, the two have a correlation of {median(paid):.2f}",
            f"{remedy}, and check that reward.function rewards the content rather than the length",
        )


def gradient(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    skipped = history.last("policy/updates_skipped", RECENT) or history.last("policy/updates_skipped", 1)
    lower = f"lower optimizer.lr (now {facts.lr:.1e}), raise optimizer.warmup_steps (now {facts.warmup_steps})"
    broken = [name for name in history.not_finite if name.startswith(("policy/", "loss/"))]
    if broken or sum(skipped) >= SKIPPED_UPDATES:
        what = f"not finite: {', '.join(broken)}" if broken else f"updates skipped for bad data: {sum(skipped):g}"
        yield Sighting(f"{what} (last {RECENT} steps)", f"{lower}, and see the bad steps in the trainer's log")
        return
    values = history.last("policy/grad_norm", FEW)
    if not values or history.rows < FIRST + FEW:
        return
    now, first = median(values), median(history.first("policy/grad_norm"))
    limit = GRADIENT_TIMES[bool(lasting)]
    if now >= max(limit * first, GRADIENT_OVER_CLIP * facts.clip_norm):
        yield Sighting(
            f"the gradient norm has grown from {first:.3g} to {now:.3g}, and is clipped to {facts.clip_norm:g}",
            f"{lower} or algorithm.kl.coef (now {facts.kl_coef:g})",
        )


def learning_rate(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    rates = history.last("policy/lr", FEW)
    if not rates or history.rows < facts.warmup_steps + FEW or any(history.last("policy/updates_skipped", FEW)):
        return
    if max(rates) <= SMALL_LR:
        yield Sighting(
            f"the learning rate is {rates[-1]:.1e}, at which no weight moves",
            f"raise optimizer.lr (now {facts.lr:.1e})",
        )


def overfitting(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    """Find the sets whose last two evaluations are worse than their best, although the training reward has risen."""
    for name, evaluations in history.evaluations.items():
        if len(evaluations) < 3:
            continue
        *earlier, last, newest = evaluations
        best = max(earlier, key=lambda result: result.score)
        if newest.reward is None:
            continue
        reward = median(history.first("reward/mean")) if best.reward is None else best.reward
        fall = best.score - max(last.score, newest.score)
        margin = max(FALL_OF_ACCURACY, ACCURACY_ERRORS * _standard_error(best))
        longer = history.last("reward/mean", FLAT_ROWS) or history.last("reward/mean", RECENT)
        risen = newest.reward - reward
        least = margin * (0.5 if name in lasting else 1.0)
        if fall < least or risen <= FLAT_ERRORS[0] * error_of_median(longer, RECENT):
            continue
        back = f"use the checkpoint of step {best.step} (checkpoint.keep_every), " if best.step else ""
        yield Sighting(
            f"eval/{name}/reward has fallen from {best.score:.3f} (step {best.step}) to {newest.score:.3f}, "
            f"while the reward in training has risen from {reward:.3g} to {newest.reward:.3g}",
            f"{back}add rows to data.train.source, or raise algorithm.kl.coef (now {facts.kl_coef:g})",
            about=name,
        )


def explained_variance(history: RowHistory, facts: Facts, lasting: Lasting) -> Iterator[Sighting]:
    values = history.last("critic/explained_variance", UNEXPLAINED_ROWS)
    if not values or history.rows < facts.critic_warmup_steps + UNEXPLAINED_ROWS:
        return
    typical = median(values)
    if typical < 0 and (lasting or max(values) < 0):
        yield Sighting(
            f"the values of the critic are worse than a constant: critic/explained_variance is {typical:.2g} (median "
            f"of {UNEXPLAINED_ROWS} steps)",
            f"change critic.optimizer.lr (now {facts.critic_lr:.1e}; lower it if critic/grad_norm is large), or raise "
            f"critic.num_iterations or critic.warmup_steps (now {facts.critic_warmup_steps})",
        )


def _standard_error(evaluation: SetResult) -> float:
    share = min(max(evaluation.score, 0.0), 1.0)
    return float((share * (1.0 - share) / max(evaluation.rows, 1.0)) ** 0.5)
