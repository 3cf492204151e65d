"""Tests the defaults in the `algorithm` section, and that options that would have no effect are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.policy_trainer.update import loss_spec
from shared.topology import Topology, load
from tests.unit.shared.topology.small_topology import problems, write

TWO_UPDATES = "algorithm.num_iterations=2"
SFT = ["algorithm.loss={name: cross_entropy}", "algorithm.group_size=1"]


def loaded(folder: Path, *overrides: str) -> Topology:
    """Load the topology, and check that loading its resolved copy gives an equal topology."""
    topology = load(write(folder), list(overrides))
    resolved = folder / "resolved.yaml"
    topology.dump_resolved(resolved)
    assert load(resolved) == topology
    return topology


@pytest.mark.parametrize(
    ("loss", "clip", "tis_cap"),
    [
        ("{name: ppo_clip}", (0.2, 0.2), 2.0),
        ("{name: gspo, aggregation: seq_mean_token_mean}", (3e-4, 4e-4), 2.0),
        ("{name: cispo}", (1.0, 4.0), 2.0),
        ("{name: cispo, clamp: both}", (0.2, 0.2), 2.0),
        ("{name: sapo}", None, 2.0),
        ("{name: importance_sampling}", None, 2.0),
        ("{name: ppo_clip, ratio_mask: {level: token}}", (0.2, 0.2), None),
        ('{name: "my.module:fn", params: {a: 1}}', None, 2.0),
    ],
)
def test_each_loss_has_only_the_options_it_uses(
    folder: Path, loss: str, clip: tuple[float, float] | None, tis_cap: float | None
) -> None:
    topology = loaded(folder, f"algorithm.loss={loss}", TWO_UPDATES)
    assert topology.algorithm.loss.clip == clip
    assert topology.algorithm.loss.tis_cap == tis_cap


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
def test_no_clip_range_is_set_by_default_for_a_ratio_that_is_always_one(folder: Path, name: str) -> None:
    loss = f"algorithm.loss={{name: {name}, aggregation: seq_mean_token_mean}}"
    topology = loaded(folder, loss)
    assert (topology.algorithm.loss.clip, topology.algorithm.loss.clamp) == (None, None)
    assert loss_spec(topology).clip_high == 0
    assert loaded(folder, loss, "algorithm.loss.anchor=rollout").algorithm.loss.clip is not None


def test_only_a_step_of_several_updates_needs_a_proximal_forward_pass(folder: Path) -> None:
    one, two = (
        loaded(folder, "algorithm.loss.anchor=proximal"),
        loaded(folder, "algorithm.loss.anchor=proximal", TWO_UPDATES),
    )
    rollout = loaded(folder, "algorithm.loss.anchor=rollout", TWO_UPDATES)
    assert [loss_spec(each).anchor for each in (one, two, rollout)] == ["present", "proximal", "rollout"]
    # Room is reserved only for the passes that run.
    assert [each.needs_proximal for each in (one, two, rollout)] == [False, True, False]


def test_supervised_fine_tuning_does_not_ask_for_a_proximal_forward(folder: Path) -> None:
    topology = loaded(folder, *SFT)
    assert topology.algorithm.loss.clip is None
    assert not topology.needs_proximal


def test_default_of_the_advantage_scale_is_set_only_for_grpo(folder: Path) -> None:
    assert loaded(folder).algorithm.advantage.scale == "std"
    assert loaded(folder).algorithm.advantage.std_epsilon == 1e-6
    assert loaded(folder, "algorithm.advantage.scale=none").algorithm.advantage.std_epsilon is None
    assert loaded(folder, "algorithm.advantage={name: rloo}").algorithm.advantage.scale is None


def test_kl_in_the_reward_starts_a_reference(folder: Path) -> None:
    topology = loaded(folder, "algorithm.kl={in: reward, estimator: k1, coef: 0.1}")
    assert topology.needs_reference


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage={name: rloo, scale: std}"], "std has no effect with advantage rloo"),
        (["algorithm.advantage={scale: none, std_epsilon: 1e-4}"], "0.0001 has no effect without scale std"),
        (["algorithm.advantage={name: opo, params: {a: 1}}"], "have no effect with advantage opo"),
        (["algorithm.advantage.name=grop"], "'grop' is not one of grpo"),
        (["algorithm.group_size=1", "algorithm.advantage={name: opo}"], "1 leaves advantage opo nothing to compare"),
        (["algorithm.loss={name: importance_sampling, clip: [0.2, 0.2]}"], "has no effect with loss importance_sam"),
        (["algorithm.loss={name: sapo, clip: [0.2, 0.2]}"], "has no effect with loss sapo"),
        (["algorithm.loss={name: sapo, temperatures: [1.0, 0.0]}", TWO_UPDATES], "0.0 is out of range: it must be"),
        (["algorithm.loss={name: cispo, clip: [0.2, 4.0]}", TWO_UPDATES], "0.2 has no effect if clamp is upper"),
        (["algorithm.loss={name: cispo, dual_clip: 3.0}"], "3.0 has no effect with loss cispo"),
        (["algorithm.loss={clamp: both}"], "both has no effect with loss ppo_clip"),
        (["algorithm.loss={temperatures: [1.0, 1.0]}"], "has no effect with loss ppo_clip"),
        (["algorithm.loss={clip: [0.2, 0.3]}"], "has no effect: the ratio is 1 if anchor is proximal and a step"),
        (["algorithm.loss={dual_clip: 3.0}"], "3.0 has no effect: the ratio is 1 if anchor is proximal"),
        (["algorithm.loss={name: cispo, clamp: both}"], "both has no effect: the ratio is 1 if anchor is proximal"),
        (["algorithm.loss={name: sapo, temperatures: [1.0, 2.0]}"], "(1.0, 2.0) has no effect: the ratio is 1 if"),
        (
            ["algorithm.kl.refresh_every=40", "checkpoint.every=20"],
            "40 has no effect: the first refresh would come after the last step (3)",
        ),
        (["algorithm.loss={dual_clip: 1.1}", TWO_UPDATES], "1.1 must exceed 1 + clip[1] (1.2)"),
        (["algorithm.loss={params: {a: 1}}"], "have no effect with loss ppo_clip"),
        (["algorithm.loss={anchor: rollout, ratio_mask: {}}"], "has no effect if anchor is rollout"),
        (["algorithm.loss={tis_cap: 5.0, ratio_mask: {high: 5.0}}"], "5.0 has no effect: ratio_mask leaves out"),
        ([*SFT, "algorithm.loss.anchor=proximal"], "proximal has no effect with loss cross_entropy"),
        ([*SFT, "algorithm.group_size=4"], "4 would be copies of one answer"),
        ([*SFT, "algorithm.kl={in: reward, coef: 0.1}"], "reward has no effect with loss cross_entropy"),
        ([*SFT, "algorithm.normalise_rewards=batch"], "does not use rewards"),
        ([*SFT, "data.eval={}", "sampling.stop=['x']"], "['x'] has no effect without data.eval, because loss cross_"),
        ([*SFT, "algorithm.overlong=mask"], "has no effect with loss cross_entropy, which does not cut answers"),
        ([*SFT, "algorithm.advantage.name=rloo"], "rloo has no effect with loss cross_entropy, which does not use adv"),
        ([*SFT, "algorithm.advantage.scale=none"], "none has no effect with loss cross_entropy"),
        (["algorithm.normalise_rewards=batch"], "batch has no effect: advantage grpo normalises"),
        (["algorithm.overlong_penalty={tokens: 9}"], "9 exceeds sampling.max_new_tokens (8)"),
        (["algorithm.filter_zero_variance.max_refill=0"], "0 is out of range"),
    ],
)
def test_option_without_effect_is_refused(folder: Path, overrides: list[str], message: str) -> None:
    lines = problems(write(folder), *overrides)
    assert len(lines) == 1
    assert message in lines[0]


def test_rewards_can_be_normalised_where_this_has_an_effect(folder: Path) -> None:
    loaded(folder, "algorithm.normalise_rewards=batch", "algorithm.overlong_penalty={tokens: 4}")
    loaded(folder, "algorithm.normalise_rewards=batch", "algorithm.advantage={name: dr_grpo}")


def test_the_sft_example_loads_unchanged() -> None:
    topology = load(Path(__file__).parents[4] / "launch" / "topologies" / "sft.yaml")
    assert topology.algorithm.loss.name == "cross_entropy"
    assert topology.services.reference is None
