"""Model, optimizer and gradients in torch. Belongs to one compute thread; knows no bus, no batch and no store."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from proto.messages import ErrorCode, LossSpec
from proto.tensors import Array
from services.policy_trainer.worker import loss as losses
from services.policy_trainer.worker.samples import PROX_KEY, REF_KEY
from shared.drill import perturb
from shared.model.load import load_model, named_weights
from shared.model.logprobs import score, token_logprobs
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.algorithm import Optimizer


@dataclass(frozen=True)
class Update:
    """What one optimizer step did: gradient norm before clipping, and its learning rate."""

    grad_norm: float
    lr: float


class TorchBackend:
    """A causal language model being trained with AdamW on one device.

    Weights of 16 bits are trained through float32 master copies: an update of 1e-6 vanishes in bfloat16.
    """

    def __init__(self, model_dir: Path, dtype: str, optimizer: Optimizer, *, max_tokens: int, threads: int) -> None:
        """`max_tokens`: of one micro-batch. Raises RpcError(bad_request) when the model cannot be loaded."""
        torch.set_num_threads(threads)
        self._optimizer_options = optimizer
        self._max_tokens = max_tokens
        self._model_dir = model_dir
        self._dtype = dtype
        self.model = load_model(model_dir, dtype)
        self._reset()

    def _reset(self) -> None:
        options = self._optimizer_options
        self._params = [each for each in self.model.parameters() if each.requires_grad]
        low = [each.dtype in (torch.bfloat16, torch.float16) for each in self._params]
        self._masters = [
            nn.Parameter(each.detach().float()) if is_low else each
            for each, is_low in zip(self._params, low, strict=True)
        ]
        self._has_masters = any(low)
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def restart(self) -> None:
        """The weights of the model directory and fresh optimizer state."""
        self._copy_weights(named_weights(load_model(self._model_dir, self._dtype)))
        self._reset()
        self.drop_gradients()

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self._params)

    @property
    def vocab_size(self) -> int:
        config: Any = self.model.config
        return int(config.vocab_size)

    def weights(self) -> dict[str, Tensor]:
        """The live weights under their Hugging Face names; they change with the next `step`."""
        return named_weights(self.model)

    @torch.no_grad()
    def logprobs(self, token_ids: Array, lengths: Array, loss_mask: Array, temperature: float) -> Array:
        """float32 [T], as `token_logprobs`, without a gradient."""
        result, _ = token_logprobs(self.model, token_ids, lengths, loss_mask, temperature, self._max_tokens)
        return to_numpy(result)

    @torch.no_grad()
    def drill_logprobs(self, token_ids: Array, lengths: Array, loss_mask: Array, seed: int) -> Array:
        """The same at temperature 1 for the model directory's weights perturbed with `seed`; leaves the model alone."""
        model = load_model(self._model_dir, self._dtype)
        for name, tensor in named_weights(model).items():
            tensor.copy_(to_torch(perturb(name, to_numpy(tensor), seed)))
        result, _ = token_logprobs(model, token_ids, lengths, loss_mask, 1.0, self._max_tokens)
        return to_numpy(result)

    def forward_backward(
        self, spec: LossSpec, flat: dict[str, Array], advantages: Array, weights: Array
    ) -> dict[str, float]:
        """Add the gradient of sum(W * loss) over all masked-in tokens; returns the additive sums.

        `flat`: the joined shards; `advantages`, `weights` float [T]. Micro-batches never change the gradient.
        """
        losses.check(spec)
        rollout, versions = to_torch(flat["rollout_logprobs"]), to_torch(flat["versions"])
        advantage, weight = to_torch(advantages), to_torch(weights)
        prox = to_torch(flat[PROX_KEY]) if spec.anchor == "proximal" else None
        ref = to_torch(flat[REF_KEY]) if spec.kl_estimator else None
        totals: dict[str, float] = {}
        for part in score(
            self.model,
            flat["token_ids"],
            flat["lengths"],
            flat["loss_mask"],
            spec.temperature,
            self._max_tokens,
            with_entropy=True,
        ):
            at = part.tokens
            data = losses.TokenData(
                rollout=rollout[at],
                advantages=advantage[at],
                weights=weight[at],
                versions=versions[at],
                prox=None if prox is None else prox[at],
                ref=None if ref is None else ref[at],
            )
            total, sums = losses.token_loss(spec, part.logprobs, data, cast(Tensor, part.entropy))
            total.backward()  # type: ignore[no-untyped-call]
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def step(self, step: int) -> Update:
        """Clip, step, zero the gradients; training step `step` (from 1) sets the warm-up's learning rate.

        Raises RpcError(bad_request) when the gradient is not finite: weights and optimizer state stay as they are.
        """
        if self._has_masters:
            for master, param in zip(self._masters, self._params, strict=True):
                master.grad = None if param.grad is None else param.grad.to(master.dtype)
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._optimizer_options.clip_norm, foreach=True)
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            self.drop_gradients()
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"step {step} refused, weights untouched: gradient norm is {grad_norm}; look for extreme "
                "log-probs or advantages in its batch, or lower optimizer.lr",
            )
        lr = self.learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._write_back()
        self.drop_gradients()
        return Update(grad_norm, lr)

    def learning_rate(self, step: int) -> float:
        """Linear from lr / warmup_steps at step 1 up to lr at step warmup_steps, then constant."""
        warmup = self._optimizer_options.warmup_steps
        return self._optimizer_options.lr * (min(1.0, step / warmup) if warmup else 1.0)

    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        for each in (*self._params, *self._masters):
            each.grad = None

    @torch.no_grad()
    def _write_back(self) -> None:
        if self._has_masters:
            for master, param in zip(self._masters, self._params, strict=True):
                param.copy_(master)

    # ---- checkpoints

    def weights_state(self) -> dict[str, Tensor]:
        """Copies of all weights, for a checkpoint that is written while training goes on."""
        return {name: tensor.clone() for name, tensor in self.weights().items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copies of AdamW's state as `<slot>/<parameter>`: exp_avg, exp_avg_sq, step, and master where there is one."""
        tensors: dict[str, Tensor] = {}
        for name, master, param in self._named():
            for slot, value in self._optimizer.state[master].items():
                tensors[f"{slot}/{name}"] = torch.as_tensor(value).detach().clone()
            if master is not param:
                tensors[f"master/{name}"] = master.detach().clone()
        return tensors

    @torch.no_grad()
    def load_state(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Take over a checkpoint. Raises RpcError(conflict) when it is of another model."""
        self._copy_weights(weights)
        self._reset()
        for name, master, param in self._named():
            slots = {
                slot: optimizer[f"{slot}/{name}"].clone()
                for slot in ("step", "exp_avg", "exp_avg_sq")
                if f"{slot}/{name}" in optimizer
            }
            if slots:
                self._optimizer.state[master] = slots
            if master is not param:
                master.copy_(optimizer[f"master/{name}"])
        self.drop_gradients()

    @torch.no_grad()
    def _copy_weights(self, weights: dict[str, Tensor]) -> None:
        mine = self.weights()
        strange = sorted(mine.keys() ^ weights.keys()) + [
            name for name in mine.keys() & weights.keys() if mine[name].shape != weights[name].shape
        ]
        if strange:
            raise RpcError(
                ErrorCode.CONFLICT, f"weights of another model: {', '.join(strange[:3])} do not fit {self._model_dir}"
            )
        for name, tensor in mine.items():
            tensor.copy_(weights[name])

    def _named(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        names = {id(each): name for name, each in self.model.named_parameters()}
        return [(names[id(param)], master, param) for master, param in zip(self._masters, self._params, strict=True)]
