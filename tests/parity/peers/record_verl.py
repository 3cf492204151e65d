"""Records verl's losses, gradients, KL and advantages: `.venv-verl/bin/python -m tests.parity.peers.record_verl`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

from tests.parity.peers import inputs

OUT = Path(__file__).parents[1] / "vectors" / "verl.npz"
NO_DUAL_CLIP = 1e9
MODES = {
    "token_mean": "token-mean",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def config(**options: Any) -> ActorConfig:
    made = ActorConfig(
        strategy="fsdp",
        rollout_n=inputs.GROUP_SIZE,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=options.pop("low", inputs.CLIP_LOW),
        clip_ratio_high=options.pop("high", inputs.CLIP_HIGH),
        clip_ratio_c=options.pop("dual", NO_DUAL_CLIP),
        tau_pos=inputs.SAPO_POSITIVE,
        tau_neg=inputs.SAPO_NEGATIVE,
    )
    made.global_batch_info.update(options)
    return made


def loss(batch: dict[str, Any], name: str, mode: str, weights: Any = None, **options: Any) -> dict[str, Any]:
    cur = torch.tensor(batch["cur"], requires_grad=True)
    mask = torch.tensor(batch["mask"])
    if mode == "dr_grpo":
        options["loss_scale_factor"] = inputs.MAX_NEW_TOKENS
    total, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=torch.tensor(batch["prox"]),
        log_prob=cur,
        advantages=torch.tensor(batch["advantages"])[:, None].expand_as(cur),
        response_mask=mask,
        loss_agg_mode=MODES[mode],
        config=config(**options),
        rollout_is_weights=weights,
    )
    (grad,) = torch.autograd.grad(total, cur)
    return {"loss": total.detach().numpy(), "grad": grad.numpy()}


def advantages(batch: dict[str, Any]) -> dict[str, Any]:
    mask = torch.tensor(batch["mask"])
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = torch.tensor(batch["rewards"])
    given = {"token_level_rewards": rewards, "response_mask": mask, "index": batch["groups"]}
    made = {
        "grpo": core_algos.compute_grpo_outcome_advantage(**given),
        "grpo_none": core_algos.compute_grpo_outcome_advantage(**given, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(**given),
        "opo": core_algos.compute_opo_outcome_advantage(**given),
        "reinforce_pp": core_algos.compute_reinforce_plus_plus_outcome_advantage(
            **given, config=SimpleNamespace(gamma=1.0)
        ),
        "reinforce_pp_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(**given),
    }
    return {f"advantage/{name}": found[0][:, 0].numpy() for name, found in made.items()}


def kl(batch: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in ("k1", "k2", "k3"):
        cur = torch.tensor(batch["cur"], requires_grad=True)
        values = core_algos.kl_penalty(cur, torch.tensor(batch["ref"]), name)
        found[f"kl/{name}/value"] = values.detach().numpy()
        (found[f"kl/{name}/grad"],) = (each.numpy() for each in torch.autograd.grad(values.sum(), cur))
    return found


def critic(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what verl computes for its critic: advantages (whitened), returns, and the clipped value loss."""
    old, mask = torch.tensor(batch["old_values"]), torch.tensor(batch["mask"]).double()
    advantages, returns = core_algos.compute_gae_advantage_return(
        torch.tensor(batch["token_rewards"]), old, mask, inputs.GAMMA, inputs.LAM
    )
    values = torch.tensor(batch["values"], requires_grad=True)
    total, clipped = core_algos.compute_value_loss(
        values, torch.tensor(batch["returns"]), old, mask, inputs.VALUE_CLIP, loss_agg_mode="token-mean"
    )
    (grad,) = torch.autograd.grad(total, values)
    made = {"advantages": advantages, "returns": returns, "loss": total, "clipped": clipped, "grad": grad}
    return {f"critic/{name}": tensor.detach().numpy() for name, tensor in made.items()}


def main() -> None:
    batch = inputs.batch()
    mask = torch.tensor(batch["mask"])
    log_ratio = torch.tensor(batch["prox"] - batch["rollout"])
    bounds = f"{inputs.MASK_LOW}_{inputs.MASK_HIGH}"
    truncated, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, "token", inputs.TIS_CAP)
    icepop, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, "token", bounds)
    cases = {f"ppo_clip/{mode}": loss(batch, "vanilla", mode) for mode in MODES}
    cases |= {
        "dual_clip/token_mean": loss(batch, "vanilla", "token_mean", dual=inputs.DUAL_CLIP),
        "gspo/seq_mean_token_mean": loss(
            batch, "gspo", "seq_mean_token_mean", low=inputs.GSPO_CLIP, high=inputs.GSPO_CLIP
        ),
        "cispo/token_mean": loss(batch, "cispo", "token_mean"),
        "sapo/seq_mean_token_mean": loss(batch, "sapo", "seq_mean_token_mean"),
        "tis/token_mean": loss(batch, "vanilla", "token_mean", weights=truncated),
        "icepop/token_mean": loss(batch, "vanilla", "token_mean", weights=icepop),
    }
    arrays: dict[str, Any] = {f"input/{name}": value for name, value in batch.items()} | advantages(batch) | kl(batch)
    # verl's k1 is log(rollout / prox), so it bounds the inverse of our ratio.
    wide = f"{1 / inputs.MASK_HIGH}_{1 / inputs.MASK_LOW}"
    tight = f"{1 / inputs.GEOMETRIC_HIGH}_{1 / inputs.GEOMETRIC_LOW}"
    for name, option, limits in (("sequence", "seq_sum_k1", wide), ("geometric", "seq_mean_k1", tight)):
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, option, limits)
        arrays[f"kept/{name}"] = kept.numpy()
    valued = inputs.valued()
    arrays |= {f"valued/{name}": value for name, value in valued.items()} | critic(valued)
    arrays |= {f"{case}/{name}": value for case, found in cases.items() for name, value in found.items()}
    np.savez_compressed(OUT, **arrays)
    print(f"verl {version('verl')}: {len(arrays)} arrays in {OUT}")


if __name__ == "__main__":
    main()
