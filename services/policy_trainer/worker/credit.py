"""Assigns credit to tokens: turns the rewards of one task into an advantage per token, with numpy in float64.

The functions see whole ragged sequences, before anything is packed, cut into micro-batches or spread over ranks. They
work on one task at a time, so their results do not depend on how the batch is divided. Statistics over the step are
left to the driver, which merges those of the tasks (`services.policy_trainer.update`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from proto.messages import CreditSpec, ErrorCode, TaskHandle
from proto.tensors import Array
from services.policy_trainer.update import FROM_TEACHER, LOSS_TOKENS, SHAPED, TRUNCATED, statistics_of
from services.policy_trainer.worker.samples import RETURNS, TOKEN_ADVANTAGES, BatchTokens
from shared.credit import CreditTask, token_kl
from shared.rpc.errors import BadInput, RpcError
from shared.stages import CREDIT, REFERENCE, TEACHER, VALUE_AFTER, VALUES, Per, declared
from shared.topology.algorithm import Advantage, is_function
from shared.user_function import find_function

Credit = Callable[[CreditTask, CreditSpec], object]
"""An estimator: returns the advantages of a task, [T], and if the run has a critic also the returns, [T]."""
_TOKEN_KEYS = tuple(
    key for key in (*CREDIT.needs, *REFERENCE.makes, *TEACHER.makes, *VALUES.makes) if declared()[key].per is Per.TOKEN
)


def gae(
    rewards: Array,
    values: Array,
    mask: Array,
    lengths: Array,
    *,
    gamma: float,
    lam: float,
    lam_value: float | None = None,
    bootstrap: Array | None = None,
) -> tuple[Array, Array]:
    """Return the advantages of generalised advantage estimation, and the returns: both float64 [T].

    With policy tokens t = 1 ... n of a sequence, V_(n+1) the sequence's `bootstrap` (0 if None) and A_(n+1) = 0:

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = delta_t + gamma lam A_(t+1),  return_t = A_t + V_t

    `rewards` and `values` are float64 [T], `mask` bool [T] selects the policy tokens, `lengths` int [S] sum to T and
    `bootstrap` is float64 [S]. The recursion visits policy tokens only: the token after a tool's output follows the one
    before it. Other tokens get 0. With `lam_value`, the returns are those of a second recursion with this lambda.

    The operations are those of a loop over single tokens, in its order, so the results are the same bit for bit.
    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv
    1506.02438), equation 16.
    """
    counts, at = _from_the_end(mask, lengths)
    after = np.zeros(len(counts)) if bootstrap is None else bootstrap.astype(np.float64)[_longest_first(counts)]
    lams = (lam,) if lam_value is None or lam_value == lam else (lam, lam_value)
    made = [np.zeros(len(mask)) for _ in lams]
    last = [np.zeros(len(counts)) for _ in lams]
    for tokens in at:
        present = len(tokens)
        following, own = after[:present], values[tokens]
        delta = rewards[tokens] + gamma * following - own
        for advantages, before, one in zip(made, last, lams, strict=True):
            before[:present] = delta + gamma * one * before[:present]
            advantages[tokens] = before[:present]
        after[:present] = own
    returns = np.where(mask, made[-1] + values, 0.0)
    return made[0], returns


def _longest_first(counts: Array) -> Array:
    return np.argsort(-counts, kind="stable")


def _from_the_end(mask: Array, lengths: Array) -> tuple[Array, list[Array]]:
    """Return the number of policy tokens of each sequence, int [S], and the positions of these tokens in [T]: those of
    the last policy tokens, then those of the tokens before them and so on, each for the longest sequences first."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    before = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
    counts = before[starts[1:]] - before[starts[:-1]]
    order = _longest_first(counts)
    ends, positions = before[starts[1:]][order], np.flatnonzero(mask)
    present = np.searchsorted(-counts[order], -np.arange(int(counts.max(initial=0))), side="left")
    return counts, [positions[ends[:sequences] - 1 - step] for step, sequences in enumerate(present)]


def place(rewards: Array, turn_rewards: Array, mask: Array, lengths: Array, sample_index: Array) -> Array:
    """Return float64 [T]: `turn_rewards` [T], plus what they lack of the sample's reward at the end of each sequence.

    `rewards` are float64 [G]. The last trained token of *every* sequence of a sample gets the same rest: the sequences
    of a sample are in the order in which they were opened, so none of them is the last. A turn reward at a token that
    is not trained moves to the next trained token of its sequence, or to the last one if no trained token follows.
    """
    made, sequence = np.zeros(len(mask)), np.repeat(np.arange(len(lengths)), lengths)
    trained, given = np.flatnonzero(mask), np.flatnonzero(turn_rewards)
    if not len(trained):
        return made
    after = np.minimum(np.searchsorted(trained, given), len(trained) - 1)
    after -= sequence[trained[after]] != sequence[given]
    stays = sequence[trained[after]] == sequence[given]  # its sequence has a trained token
    np.add.at(made, trained[after[stays]], turn_rewards[given[stays]])
    rest = rewards - np.bincount(sample_index[sequence], weights=made, minlength=len(rewards))
    last = trained[np.append(sequence[trained[1:]] != sequence[trained[:-1]], True)]
    made[last] += rest[sample_index[sequence[last]]]
    return made


def _reinforce(task: CreditTask, spec: CreditSpec) -> Array:
    """Return the discounted sum of the rewards from each token on.

    With whitening over the step and the KL in the reward, this is REINFORCE++ (arXiv 2501.03262), section 3.
    """
    nothing = np.zeros(len(task.mask))
    return gae(task.token_rewards, nothing, task.mask, task.lengths, gamma=spec.gamma, lam=1.0)[0]


def _gae(task: CreditTask, spec: CreditSpec) -> tuple[Array, Array]:
    """Return the advantages and returns of `gae` with the values of the task."""
    if task.values is None:
        raise BadInput("advantage gae without values: run forward of a critic first")
    bootstrap = None
    if task.value_after is not None:
        bootstrap = np.where(task.truncated, task.value_after, 0.0)[task.sample_index]
    return gae(
        task.token_rewards,
        task.values,
        task.mask,
        task.lengths,
        gamma=spec.gamma,
        lam=spec.lam,
        lam_value=spec.lam_value,
        bootstrap=bootstrap,
    )


BUILTIN: Mapping[str, Credit] = MappingProxyType({"reinforce": _reinforce, "gae": _gae})


def own_credit(options: Advantage) -> Credit | None:
    """Return the function that `options` names by import path if it works per token, else None.

    Raises RpcError(bad_request) with a one-line message if it cannot be imported or called as `fn(task, **params)`.
    """
    if not (is_function(options.name) and options.per_token):
        return None
    try:
        function = find_function(options.name, "algorithm.advantage.name", 1, options.params)
    except ValueError as error:
        raise BadInput(str(error)) from error

    def credit(task: CreditTask, _: CreditSpec) -> object:
        return function(task, **options.params)

    return credit


def check(spec: CreditSpec, own: Credit | None) -> Credit:
    """Return the estimator that `spec` names. `own` is the topology's function if the name is an import path.

    Raises RpcError(bad_request) if there is no such estimator.
    """
    credit = own if own is not None and is_function(spec.name) else BUILTIN.get(spec.name)
    if spec.name == "gae" and not spec.values:
        raise BadInput("advantage gae needs the values of a critic: set CreditSpec.values")
    if credit is None:
        raise BadInput(f"advantage {spec.name} per token: use {', '.join(BUILTIN)} or the topology's own")
    return credit


def tasks_of(
    handles: Sequence[TaskHandle], tokens: BatchTokens, scalars: Mapping[str, Array], spec: CreditSpec
) -> Iterator[CreditTask]:
    """Yield the arguments of the estimator for every task of a batch, in order.

    `tokens` holds the joined shards of the batch, and `scalars` its numbers per sample (`SCALARS`).
    """
    last, end_sequence, end_token = 0, 0, 0
    sizes = zip(handles, tokens.sequences_of_task, tokens.tokens_of_task, strict=True)
    for handle, sequence_count, token_count in sizes:
        sample = slice(last, last := last + handle.samples)
        sequence = slice(end_sequence, end_sequence := end_sequence + int(sequence_count))
        token = slice(end_token, end_token := end_token + int(token_count))
        per_token = {name: tokens.flat[name][token] for name in _TOKEN_KEYS if name in tokens.flat}
        lengths = tokens.flat["lengths"][sequence].astype(np.int64)
        sample_index = tokens.flat["sample_index"][sequence].astype(np.int64)
        trained = np.repeat((scalars[LOSS_TOKENS][sample] > 0)[sample_index], lengths)
        mask = (per_token["loss_mask"] != 0) & trained
        rewards = scalars[SHAPED][sample].astype(np.float64)
        turns = per_token["turn_rewards"].astype(np.float64) * spec.turn_scale
        placed = place(rewards, turns, mask, lengths, sample_index)
        kl = teacher_kl = None
        if spec.distill_coef:
            difference = token_kl("k1", per_token["rollout_logprobs"], per_token[TEACHER.makes[0]])
            teacher_kl = np.where(mask, difference, 0.0)
            placed -= spec.distill_coef * teacher_kl
        if spec.kl_estimator:
            estimates = token_kl(spec.kl_estimator, per_token["rollout_logprobs"], per_token["ref_logprobs"])
            kl = np.where(mask, estimates, 0.0)
            placed -= spec.kl_coef * kl
        yield CreditTask(
            task_id=handle.task_id,
            rewards=rewards,
            token_rewards=placed,
            kl=kl,
            teacher_kl=teacher_kl,
            mask=mask,
            lengths=lengths,
            sample_index=sample_index,
            truncated=scalars[TRUNCATED][sample] != 0,
            token_ids=per_token["token_ids"].astype(np.int64),
            rollout_logprobs=per_token["rollout_logprobs"].astype(np.float64),
            versions=per_token["versions"].astype(np.int64),
            values=per_token["values"].astype(np.float64) if spec.values else None,
            value_after=scalars[VALUE_AFTER][sample].astype(np.float64) if spec.bootstrap else None,
        )


def assign(
    tasks: Iterable[CreditTask], credit: Credit, spec: CreditSpec
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Return the advantages of each task, and with values its returns, float32 [T] by key; and the statistics of
    `CreditDone`.

    Raises RpcError(bad_data) that names the tasks for which the estimator fails or does not return T finite numbers.
    """
    made: list[dict[str, Array]] = []
    rows: list[dict[str, float]] = []
    wrong: list[str] = []
    cause = ""
    for task in tasks:
        try:
            arrays = _checked(task, credit(task, spec), spec)
        except Exception as error:  # anything that a user's function raises
            wrong.append(task.task_id)
            cause = cause or f"{task.task_id}: advantage {spec.name} {_why(error)}"
            continue
        made.append({name: array.astype(np.float32) for name, array in arrays.items()})
        rows.append({"count": float(task.mask.sum()), **_moments("", arrays[TOKEN_ADVANTAGES][task.mask])})
        if task.teacher_kl is not None:
            rows[-1] |= _moments(FROM_TEACHER, task.teacher_kl[task.mask])
        if task.values is not None:
            returns = arrays[RETURNS][task.mask]
            rows[-1] |= _moments("return_", returns) | _moments("error_", returns - task.values[task.mask])
    if wrong:
        text = f"{cause}; advantages of {len(wrong)} of {len(wrong) + len(made)} tasks refused, weights untouched"
        raise RpcError(ErrorCode.BAD_DATA, text, names=wrong)
    names = statistics_of(spec) if rows else ()
    return made, {name: np.array([row[name] for row in rows], np.float64) for name in names}


def _moments(prefix: str, numbers: Array) -> dict[str, float]:
    """Return the mean of `numbers` and the sum of their squared deviations from it, with the names of statistics."""
    mean = float(numbers.mean()) if len(numbers) else 0.0
    return {f"{prefix}mean": mean, f"{prefix}squares": float(np.square(numbers - mean).sum())}


def _checked(task: CreditTask, answer: Any, spec: CreditSpec) -> dict[str, Array]:
    """Return what an estimator has returned for `task` by key, each float64 [T], 0 at tokens that are not trained.

    Raises ValueError if it is not T finite numbers, or two times T if the run has a critic.
    """
    keys = CREDIT.makes if spec.values else (TOKEN_ADVANTAGES,)
    pair = isinstance(answer, tuple)
    if pair != (len(keys) > 1) or (pair and len(answer) != len(keys)):
        what = f"{len(answer)} values" if pair else "advantages alone"
        wanted = "(advantages, returns), because the critic learns the returns" if spec.values else "advantages alone"
        raise ValueError(f"returned {what}; it must return {wanted}")
    return {
        key: _numbers(task, f"as {key} " if pair else "", values)
        for key, values in zip(keys, answer if pair else (answer,), strict=True)
    }


def _numbers(task: CreditTask, where: str, answer: Any) -> Array:
    values, tokens = np.asarray(answer), len(task.mask)
    if values.shape != (tokens,) or values.dtype.kind not in "fiu":
        shape = list(values.shape)
        raise ValueError(f"returned {where}{values.dtype} {shape}; it must return {tokens} numbers, one per token")
    made = np.where(task.mask, values, 0.0)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
        bad = ~np.isfinite(made.astype(np.float32))
    if bad.any():
        count, first = int(bad.sum()), bad.argmax()
        raise ValueError(f"returned {where}{count} numbers that are not finite, the first at token {first}")
    return made


def _why(error: Exception) -> str:
    """Return why an estimator failed, with the innermost line of a user's function."""
    if isinstance(error, ValueError) and str(error).startswith("returned "):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"raised {type(error).__name__}: {error} (at {frames[-1].filename}:{frames[-1].lineno})".replace("\n", " ")
