"""Records TRL's losses of pairs, with gradients: `.venv-trl/bin/python -m tests.parity.peers.record_trl_preferences`.

TRL computes each loss in a method of its trainer. The method is called on an object that has only the attributes that
the method reads, with a function that returns log-probs, or rewards, in place of a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from torch import Tensor
from trl.experimental.cpo import cpo_trainer
from trl.trainer import dpo_trainer, reward_trainer

from tests.parity.peers import inputs

OUT = Path(__file__).parents[1] / "vectors" / "trl_preferences.npz"
SAME = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu")


class Model:
    """Takes the place of a model: returns outputs that were made before."""

    training = True

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def __call__(self, **_: Any) -> Any:
        return self._outputs


def scored(logprobs: Tensor) -> Any:
    """Return the outputs that `DPOTrainer._compute_loss` reads, of which only the log-probs matter."""
    zeros = torch.zeros_like(logprobs.detach())
    return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def metrics() -> dict[str, Any]:
    return {"train": defaultdict(list)}


def dpo(kind: str, beta: float, batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return TRL's loss of this kind as a function of the log-probs. The samples are first all chosen ones, then all
    rejected ones."""
    mask = torch.tensor(batch["mask"])
    # A first column stands for the prompt, for which there are no log-probs.
    completion = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask], dim=1)

    def loss(cur: Tensor) -> Tensor:
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=True),
            accelerator=SAME,
            aux_loss_enabled=False,
            precompute_ref_logps=True,
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            loss_types=[kind],
            loss_weights=[1.0],
            beta=beta,
            use_weighting=False,
            label_smoothing=0.0,
            _metrics=metrics(),
            _total_train_tokens=0,
            _tp_size=1,
        )
        chosen, rejected = (torch.tensor(batch["ref"]) * mask).sum(1).chunk(2)
        given = {"completion_mask": completion, "input_ids": completion, "attention_mask": completion}
        given |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        total: Tensor = dpo_trainer.DPOTrainer._compute_loss(trainer, Model(scored(cur * mask)), given, False)
        return total

    return loss


def simpo(batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    mask = torch.tensor(batch["mask"])

    def loss(cur: Tensor) -> Tensor:
        chosen, rejected = ((cur * mask).sum(1) / mask.sum(1)).chunk(2)  # as `get_batch_logps` averages
        trainer = SimpleNamespace(
            alpha=0.0,
            accelerator=SAME,
            loss_type="simpo",
            simpo_gamma=inputs.SIMPO_MARGIN,
            beta=inputs.SIMPO_BETA,
            label_smoothing=0.0,
        )
        losses: Tensor = cpo_trainer.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]
        return losses.mean()

    return loss


def bradley_terry(batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return the loss of TRL's reward trainer, with the last output of each sample as its reward."""
    last = torch.tensor(batch["mask"]).sum(1) - 1

    def loss(cur: Tensor) -> Tensor:
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(center_rewards_coefficient=None),
            accelerator=SAME,
            _metrics=metrics(),
            _total_train_tokens=0,
            _tp_size=1,
        )
        rewards = cur[torch.arange(len(cur)), last][:, None]
        given = {"attention_mask": torch.tensor(batch["mask"])}
        model = Model(SimpleNamespace(logits=rewards))
        total: Tensor = reward_trainer.RewardTrainer.compute_loss(trainer, model, given)
        return total

    return loss


def main() -> None:
    batch = inputs.batch()
    losses = {
        "dpo": dpo("sigmoid", inputs.DPO_BETA, batch),
        "ipo": dpo("ipo", inputs.DPO_BETA, batch),
        "simpo": simpo(batch),
        "bradley_terry": bradley_terry(batch),
    }
    arrays = {f"input/{name}": batch[name] for name in ("mask", "cur", "ref")}
    for name, loss in losses.items():
        cur = torch.tensor(batch["cur"], requires_grad=True)
        total = loss(cur)
        (gradient,) = torch.autograd.grad(total, [cur])
        arrays |= {f"{name}/loss": total.detach().numpy(), f"{name}/grad": gradient.numpy()}
    np.savez_compressed(OUT, **arrays)
    print(f"trl {trl.__version__}: {len(arrays)} arrays in {OUT}")


if __name__ == "__main__":
    main()
