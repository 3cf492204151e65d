"""Credit per token: numbers by hand, a plain double loop, and the division of a batch among ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proto.messages import CreditSpec, ErrorCode, TaskHandle
from proto.tensors import Array
from services.policy_trainer.update import LOSS_TOKENS, SHAPED, TRUNCATED, moments, whitenings
from services.policy_trainer.worker import samples
from services.policy_trainer.worker.credit import BUILTIN, assign, check, gae, own_credit, place, tasks_of
from shared.credit import CreditTask, token_kl
from shared.rpc.errors import RpcError
from shared.topology.algorithm import Advantage

REINFORCE = CreditSpec(name="reinforce", gamma=1.0)
# Mask 0 1 1 0 0 1 1: a prompt, two sampled tokens, a tool's answer of two tokens, two sampled tokens.
MASK = np.array([0, 1, 1, 0, 0, 1, 1], bool)


def at_mask(values: list[float]) -> Array:
    made = np.zeros(len(MASK))
    made[MASK] = values
    return made


def by_hand(bootstrap: float | None) -> tuple[Array, Array]:
    return gae(
        at_mask([0, 0.1, 0, 1]),
        at_mask([0.5, 0.4, 0.3, 0.2]),
        MASK,
        np.array([7]),
        gamma=0.9,
        lam=0.8,
        bootstrap=None if bootstrap is None else np.array([bootstrap]),
    )


@pytest.mark.parametrize(
    ("bootstrap", "advantages", "returns"),
    [
        (None, [0.0747904, 0.29832, 0.456, 0.8], [0.5747904, 0.69832, 0.756, 1.0]),
        (0.6, [0.27634432, 0.578256, 0.8448, 1.34], [0.77634432, 0.978256, 1.1448, 1.54]),
    ],
)
def test_gae_equals_the_numbers_by_hand(bootstrap: float | None, advantages: list[float], returns: list[float]) -> None:
    made = by_hand(bootstrap)
    np.testing.assert_allclose(made[0], at_mask(advantages), rtol=0, atol=1e-15)
    np.testing.assert_allclose(made[1], at_mask(returns), rtol=0, atol=1e-15)


def double_loop(
    rewards: Array, values: Array, mask: Array, lengths: Array, gamma: float, lam: float, after: Array
) -> tuple[Array, Array]:
    advantages, returns, begin = np.zeros(len(mask)), np.zeros(len(mask)), 0
    for sequence, length in enumerate(lengths):
        following, last = float(after[sequence]), 0.0
        for token in range(begin + length - 1, begin - 1, -1):
            if mask[token]:
                delta = rewards[token] + gamma * following - values[token]
                last = delta + gamma * lam * last
                following = values[token]
                advantages[token], returns[token] = last, last + values[token]
        begin += length
    return advantages, returns


@pytest.mark.parametrize("seed", range(20))
def test_gae_equals_a_double_loop_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, size=rng.integers(1, 9))
    tokens = int(lengths.sum())
    mask = rng.random(tokens) < rng.choice([0.0, 0.2, 0.9, 1.0])
    rewards, values, after = rng.normal(size=tokens), rng.normal(size=tokens), rng.normal(size=len(lengths))
    gamma, lam = rng.random(2)
    expected = double_loop(rewards, values, mask, lengths, gamma, lam, after)
    made = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam, bootstrap=after)
    assert [array.tobytes() for array in made] == [array.tobytes() for array in expected]


def test_lam_value_changes_only_the_returns() -> None:
    rng = np.random.default_rng(0)
    rewards, values, mask, lengths = rng.normal(size=9), rng.normal(size=9), np.ones(9, bool), np.array([4, 5])
    advantages, returns = gae(rewards, values, mask, lengths, gamma=0.9, lam=0.5, lam_value=1.0)
    assert (advantages == gae(rewards, values, mask, lengths, gamma=0.9, lam=0.5)[0]).all()
    assert (returns == gae(rewards, values, mask, lengths, gamma=0.9, lam=1.0)[1]).all()


def test_gae_of_no_tokens_and_no_sequences() -> None:
    nothing = np.zeros(0)
    for made in gae(nothing, nothing, np.zeros(0, bool), np.zeros(0, int), gamma=1.0, lam=1.0):
        assert made.shape == (0,)


def test_the_rest_of_a_reward_is_at_the_end_of_every_sequence() -> None:
    mask = np.array([0, 1, 1, 0, 1, 0, 0, 1], bool)
    turns = np.array([0, 0, 0.25, 0, 0, 0, 0, 0])
    placed = place(np.array([1.0, -1.0]), turns, mask, np.array([4, 2, 2]), np.array([0, 0, 1]))
    assert placed.tolist() == [0, 0, 0.25 + 0.75, 0, 0.75, 0, 0, -1]


def test_a_turn_reward_at_an_untrained_token_moves_to_the_next_trained_one() -> None:
    mask = np.array([0, 1, 0, 1, 0, 0, 0], bool)
    turns = np.array([0, 0, 0.5, 0, 0.125, 0, 0.75])
    placed = place(np.array([2.0, 3.0]), turns, mask, np.array([5, 2]), np.array([0, 1]))
    assert placed.tolist() == [0, 0, 0, 2.0, 0, 0, 0]  # the second sequence has no trained token


def batch(rng: np.random.Generator, tasks: int) -> tuple[list[TaskHandle], list[dict[str, Array]], dict[str, Array]]:
    """Return tasks with one to three samples of one or two sequences, their shards, and the numbers of their
    samples."""
    handles, shards = [], []
    for number in range(tasks):
        count = int(rng.integers(1, 4))
        index = np.repeat(np.arange(count), rng.integers(1, 3, size=count)).astype(np.int32)
        lengths = rng.integers(2, 9, size=len(index)).astype(np.int32)
        total = int(lengths.sum())
        mask = (rng.random(total) < 0.7).astype(np.uint8)
        shards.append(
            {
                "lengths": lengths,
                "sample_index": index,
                "loss_mask": mask,
                "token_ids": rng.integers(0, 99, size=total).astype(np.int32),
                "rollout_logprobs": np.where(mask, -rng.random(total), 0).astype(np.float32),
                "ref_logprobs": np.where(mask, -rng.random(total), 0).astype(np.float32),
                "versions": np.where(mask, 3, -1).astype(np.int32),
                "turn_rewards": np.where(mask & (rng.random(total) < 0.2), rng.normal(size=total), 0).astype(
                    np.float32
                ),
            }
        )
        handles.append(TaskHandle(f"train/0/{number}", 1, count, total, 0, [0]))
    size = sum(handle.samples for handle in handles)
    scalars = {
        SHAPED: rng.normal(size=size).astype(np.float32),
        LOSS_TOKENS: (rng.random(size) < 0.9).astype(np.int32),
        TRUNCATED: (rng.random(size) < 0.2).astype(np.uint8),
    }
    return handles, shards, scalars


def credited(
    handles: list[TaskHandle],
    shards: list[dict[str, Array]],
    scalars: dict[str, Array],
    spec: CreditSpec = REINFORCE,
    own: Any = None,
) -> tuple[list[Array], dict[str, Array]]:
    tokens = samples.join({name: [task[name] for task in shards] for name in shards[0]})
    made, statistics = assign(tasks_of(handles, tokens, scalars, spec), check(spec, own), spec)
    return [arrays["token_advantages"] for arrays in made], statistics


def test_advantages_do_not_depend_on_how_the_tasks_are_divided() -> None:
    handles, shards, scalars = batch(np.random.default_rng(1), 12)
    ends = np.cumsum([handle.samples for handle in handles])
    whole, statistics = credited(handles, shards, scalars)
    for parts in (2, 3, 12):
        made: list[Array] = []
        merged: list[dict[str, Array]] = []
        for part in np.array_split(np.arange(12), parts):
            chosen = slice(ends[part[0]] - handles[part[0]].samples, ends[part[-1]])
            of_part = {name: values[chosen] for name, values in scalars.items()}
            advantages, of_tasks = credited([handles[at] for at in part], [shards[at] for at in part], of_part)
            made += advantages
            merged.append(of_tasks)
        assert all(one.tobytes() == other.tobytes() for one, other in zip(made, whole, strict=True))
        for name, values in statistics.items():
            assert np.concatenate([of_tasks[name] for of_tasks in merged]).tobytes() == values.tobytes()


def test_merged_statistics_whiten_all_tokens_of_the_step_or_of_the_mini_batch() -> None:
    handles, shards, scalars = batch(np.random.default_rng(2), 8)
    advantages, statistics = credited(handles, shards, scalars)
    trained = [
        made[task.mask]
        for made, task in zip(
            advantages,
            tasks_of(
                handles, samples.join({name: [task[name] for task in shards] for name in shards[0]}), scalars, REINFORCE
            ),
            strict=True,
        )
    ]
    for scope, size in (("step", 8), ("mini_batch", 3), ("mini_batch", 8)):
        shift, scale = whitenings(scope, statistics, size)
        for first in range(0, 8, size):
            part = range(first, min(first + size, 8))
            numbers = np.concatenate([trained[at] for at in part]).astype(np.float64)
            white = np.concatenate([(trained[at] - shift[at]) * scale[at] for at in part])
            expected = (numbers - numbers.mean()) / np.sqrt(numbers.var(ddof=1) + 1e-8)
            np.testing.assert_allclose(white, expected, rtol=0, atol=1e-6)  # the advantages are float32
    assert whitenings("none", statistics, 8)[1].tolist() == [1.0] * 8


def test_whitening_a_single_token_gives_0() -> None:
    one = {"count": np.array([0.0, 1.0]), "mean": np.array([0.0, 3.0]), "squares": np.zeros(2)}
    assert moments(one) == (1.0, 3.0, 0.0)
    shift, scale = whitenings("step", one, 2)
    assert (3.0 - shift[1]) * scale[1] == 0.0


def test_reinforce_is_the_discounted_sum_of_later_rewards_with_the_kl_at_each_token() -> None:
    handles, shards, scalars = batch(np.random.default_rng(3), 1)
    spec = CreditSpec(name="reinforce", gamma=0.5, kl_estimator="k1", kl_coef=0.1, turn_scale=2.0)
    (made,), _ = credited(handles, shards, scalars, spec)
    (task,) = tasks_of(handles, samples.join({name: [of] for name, of in shards[0].items()}), scalars, spec)
    kl = token_kl("k1", shards[0]["rollout_logprobs"], shards[0]["ref_logprobs"])
    placed = place(
        scalars[SHAPED].astype(np.float64),
        2.0 * shards[0]["turn_rewards"].astype(np.float64),
        task.mask,
        task.lengths,
        task.sample_index,
    )
    expected, begin = np.zeros(len(made)), 0
    for length in task.lengths:
        total = 0.0
        for token in range(begin + length - 1, begin - 1, -1):
            if task.mask[token]:
                total = placed[token] - 0.1 * kl[token] + 0.5 * total
                expected[token] = total
        begin += length
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)
    assert task.kl is not None
    assert not task.kl[~task.mask].any()


def test_the_difference_to_a_teacher_is_a_reward_of_each_token_and_discounts() -> None:
    handles, shards, scalars = batch(np.random.default_rng(6), 3)
    for task in shards:
        task["teacher_logprobs"] = task["ref_logprobs"]
    spec = CreditSpec(name="reinforce", gamma=0.5, distill_coef=0.3)
    as_kl = CreditSpec(name="reinforce", gamma=0.5, kl_estimator="k1", kl_coef=0.3)
    made, statistics = credited(handles, shards, scalars, spec)
    expected, _ = credited(handles, shards, scalars, as_kl)
    assert [array.tobytes() for array in made] == [array.tobytes() for array in expected]
    trained = [task["loss_mask"] != 0 for task in shards]
    differences = np.concatenate(
        [
            (task["rollout_logprobs"].astype(np.float64) - task["teacher_logprobs"])[mask]
            for task, mask in zip(shards, trained, strict=True)
        ]
    )
    assert moments(statistics, "teacher_")[1] == pytest.approx(differences.mean(), rel=1e-12)


def test_masked_samples_have_no_credit_and_do_not_count() -> None:
    handles, shards, scalars = batch(np.random.default_rng(4), 3)
    scalars[LOSS_TOKENS][:] = 0
    advantages, statistics = credited(handles, shards, scalars)
    assert not any(made.any() for made in advantages)
    assert not statistics["count"].any()


def own(task: CreditTask, scale: float = 1.0) -> Array:
    """Return an advantage that shows which tokens the function has seen."""
    return scale * np.arange(len(task.mask), dtype=np.float64)


def test_a_function_of_ones_own_sees_whole_tasks() -> None:
    handles, shards, scalars = batch(np.random.default_rng(5), 2)
    options = Advantage(name=f"{__name__}:own", per="token", params={"scale": 2.0})
    spec = CreditSpec(name=options.name, gamma=1.0)
    advantages, _ = credited(handles, shards, scalars, spec, own_credit(options))
    for made, handle, task in zip(advantages, handles, shards, strict=True):
        trained = task["loss_mask"] != 0
        assert len(made) == handle.tokens
        assert not made[~trained].any()
        assert set(made[trained]) <= set(2.0 * np.arange(handle.tokens))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda task: np.zeros(3), r"advantage .* returned float64 \[3\]; it must return \d+ numbers, one per token"),
        (lambda task: np.where(task.mask, np.nan, 0), r"returned \d+ numbers that are not finite, the first at token"),
        (lambda task: np.where(task.mask, 1e39, 0), "not finite"),
        (lambda task: task.nothing, r"raised AttributeError: .*\(at .*test_credit.py:\d+\)"),
        (lambda task: None, r"returned object \[\]"),
    ],
)
def test_bad_credit_names_the_tasks(answer: Any, why: str) -> None:
    handles, shards, scalars = batch(np.random.default_rng(6), 3)
    scalars[LOSS_TOKENS][:] = 1
    spec = CreditSpec(name="mine:fn", gamma=1.0)
    with pytest.raises(RpcError, match=why) as raised:
        credited(handles, shards, scalars, spec, lambda task, _: answer(task))
    assert raised.value.code == ErrorCode.BAD_DATA
    assert raised.value.names == [handle.task_id for handle in handles]
    assert "weights untouched" in str(raised.value)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(RpcError, match="advantage grpo per token: use reinforce, gae or the topology's own"):
        check(CreditSpec(name="grpo", gamma=1.0), None)
    assert list(BUILTIN) == ["reinforce", "gae"]
