"""Records TRL's losses, gradients and advantages: `.venv-trl/bin/python -m tests.parity.peers.record_trl`.

TRL computes its loss in a method of the trainer. The method is called on an object that has only the attributes that
the method reads, with log-probs in place of a model. The statements that compute advantages are in the middle of long
methods, so they are cut out of TRL's source and run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl.trainer import grpo_trainer, rloo_trainer

from tests.parity.peers import inputs

OUT = Path(__file__).parents[1] / "vectors" / "trl.npz"
SAME: dict[str, Any] = {"reduce": lambda x, reduction: x, "gather": lambda x: x, "gather_for_metrics": lambda x: x}


def trainer(loss_type: str, **options: Any) -> Any:
    """Return an object with the attributes of a trainer that `GRPOTrainer._compute_loss` reads, for one process without
    accumulation."""
    fields: dict[str, Any] = {
        "loss_type": loss_type,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, sync_gradients=False, **SAME),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": inputs.CLIP_LOW,
        "epsilon_high": inputs.CLIP_HIGH,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": inputs.MAX_NEW_TOKENS,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "args": SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=inputs.SAPO_POSITIVE,
            sapo_temperature_neg=inputs.SAPO_NEGATIVE,
        ),
    }
    for name, value in options.items():
        if name == "delta":
            fields["args"].delta = value
        else:
            fields[name] = value
    return SimpleNamespace(**fields)


def loss(batch: dict[str, Any], loss_type: str, is_ratio: Any = None, **options: Any) -> dict[str, Any]:
    """Return TRL's loss and its gradients with respect to log-probs and entropies."""
    cur = torch.tensor(batch["cur"], requires_grad=True)
    entropy = torch.tensor(batch["entropy"], requires_grad=True)
    made = trainer(loss_type, **options)
    made._get_per_token_logps_and_entropies = lambda *_, **__: (cur, entropy, None)
    mask = torch.tensor(batch["mask"])
    given = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"]),
        "old_per_token_logps": torch.tensor(batch["prox"]),
        "ref_per_token_logps": torch.tensor(batch["ref"]),
        "num_items_in_batch": mask.sum(),
    }
    if is_ratio is not None:
        given["importance_sampling_ratio"] = is_ratio
    total = grpo_trainer.GRPOTrainer._compute_loss(made, None, given)
    grads = torch.autograd.grad(total, [cur, entropy], allow_unused=True)
    found = {"loss": total.detach().numpy(), "grad": grads[0].numpy()}
    if grads[1] is not None:
        found["entropy_grad"] = grads[1].numpy()
    return found


def statements(function: Any, first: str, last: str) -> Any:
    """Compile the statements of a method from the one that begins with `first` to the one that begins with `last`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body  # type: ignore[attr-defined]
    texts = [ast.unparse(each) for each in body]
    begin = next(i for i, text in enumerate(texts) if text.startswith(first))
    end = next(i for i, text in enumerate(texts) if i >= begin and text.startswith(last))
    return compile(ast.Module(body=body[begin : end + 1], type_ignores=[]), "<trl>", "exec")


def run(module: Any, code: Any, **names: Any) -> Any:
    space = {**vars(module), **names}
    exec(code, space)  # noqa: S102  TRL's own statements
    return space


def advantages(batch: dict[str, Any]) -> dict[str, Any]:
    rewards = torch.tensor(batch["rewards"])
    common = {
        "rewards_per_func": rewards[:, None],
        "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool),
        "num_generations": inputs.GROUP_SIZE,
        "device": "cpu",
        "mode": "train",
    }
    found: dict[str, Any] = {}
    code = statements(
        grpo_trainer.GRPOTrainer._generate_and_score_completions,
        "if self.multi_objective_aggregation",
        "advantages = torch.nan_to_num",
    )
    for scale in ("group", "none"):
        options = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", scale_rewards=scale, reward_weights=torch.ones(1)
        )
        found[f"advantage/grpo_{scale}"] = run(grpo_trainer, code, self=options, **common)["advantages"].numpy()
    code = statements(
        rloo_trainer.RLOOTrainer._generate_and_score_completions,
        "rewards = (rewards_per_func",
        "advantages = torch.nan_to_num",
    )
    for beta in (0.0, inputs.KL_COEF):
        options = SimpleNamespace(
            reward_weights=torch.ones(1), reward_clip_range=None, beta=beta, normalize_advantages=False
        )
        made = run(
            rloo_trainer,
            code,
            self=options,
            gather=lambda x: x,
            old_per_token_logps=torch.tensor(batch["prox"]),
            ref_per_token_logps=torch.tensor(batch["ref"]),
            completion_mask=torch.tensor(batch["mask"]),
            **common,
        )
        found[f"advantage/rloo{'_kl' if beta else ''}"] = made["advantages"].numpy()
    return found


def is_ratio(batch: dict[str, Any], mode: str) -> torch.Tensor:
    """Return the importance-sampling ratio as `_generate_and_score_completions` computes it."""
    source = ast.parse(textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions)))
    wanted = "if self.use_vllm and self.vllm_importance_sampling_correction:"
    block = next(
        node
        for node in ast.walk(source)
        if isinstance(node, ast.If) and ast.unparse(node).startswith(wanted) and "invalid_mis_mask" in ast.unparse(node)
    )
    made = run(
        grpo_trainer,
        compile(ast.Module(body=[block], type_ignores=[]), "<trl>", "exec"),
        self=SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=inputs.MASK_LOW if mode.endswith("mask") else None,
            vllm_importance_sampling_clip_max=inputs.MASK_HIGH if mode.endswith("mask") else inputs.TIS_CAP,
        ),
        completion_mask=torch.tensor(batch["mask"]),
        tool_mask=None,
        old_per_token_logps=torch.tensor(batch["prox"]),
        sampling_per_token_logps=torch.tensor(batch["rollout"]),
    )
    ratio: torch.Tensor = made["vllm_importance_sampling_ratio"]
    return ratio


def main() -> None:
    batch = inputs.batch()
    cases: dict[str, dict[str, Any]] = {
        "ppo_clip/seq_mean_token_mean": loss(batch, "grpo"),
        "ppo_clip/token_mean": loss(batch, "bnpo"),
        "ppo_clip/token_mean_dapo": loss(batch, "dapo"),
        "ppo_clip/dr_grpo": loss(batch, "dr_grpo"),
        "ppo_clip/seq_mean_token_sum": loss(batch, "luspo"),
        "dual_clip/token_mean": loss(batch, "bnpo", delta=inputs.DUAL_CLIP),
        "gspo/seq_mean_token_mean": loss(
            batch,
            "grpo",
            importance_sampling_level="sequence",
            epsilon_low=inputs.GSPO_CLIP,
            epsilon_high=inputs.GSPO_CLIP,
        ),
        "cispo/token_mean": loss(batch, "cispo", epsilon_high=inputs.CISPO_UPPER),
        "sapo/seq_mean_token_mean": loss(batch, "sapo"),
        "kl/token_mean": loss(batch, "bnpo", beta=inputs.KL_COEF),
        "entropy/token_mean": loss(batch, "bnpo", _entropy_bonus_enabled=True, entropy_coef=inputs.ENTROPY_COEF),
    }
    for mode in ("token_truncate", "token_mask", "sequence_mask"):
        cases[f"{mode}/token_mean"] = loss(batch, "bnpo", is_ratio=is_ratio(batch, mode), use_vllm=True)
    arrays = {f"input/{name}": value for name, value in batch.items()} | advantages(batch)
    arrays["is_ratio/sequence_mask"] = is_ratio(batch, "sequence_mask").numpy()
    arrays |= {f"{case}/{name}": value for case, found in cases.items() for name, value in found.items()}
    np.savez_compressed(OUT, **arrays)
    print(f"trl {trl.__version__}: {len(arrays)} arrays in {OUT}")


if __name__ == "__main__":
    main()
