"""The megatron backend: Llama, Qwen2 and Qwen3 over tp, pp, cp and dp. Knows no bus and no loss, and never normalises.

Transformer Engine is used where it is installed beside CUDA, and brings sequence parallelism when tp > 1; both choose
themselves. On CPU the same layers run on gloo through `cpu_shims`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from proto.messages import ErrorCode
from proto.tensors import Array
from services.policy_trainer.layout import Place
from services.policy_trainer.sums import add_up
from services.policy_trainer.worker.backend import (
    BackendOptions,
    LocalScores,
    Sequences,
    State,
    TokenLoss,
    Update,
)
from services.policy_trainer.worker.megatron import architecture, files
from services.policy_trainer.worker.megatron.converter import Converter
from services.policy_trainer.worker.megatron.cpu_shims import megatron_device
from services.policy_trainer.worker.megatron.groups import Groups
from services.policy_trainer.worker.megatron.model import Packed, PackedGPT, transformer_config
from services.policy_trainer.worker.megatron.trained import Trained
from services.policy_trainer.worker.residency import Part
from shared.model import attention, context, tree
from shared.model.logprobs import Entropy, Scores
from shared.model.shelf import Shelf
from shared.rpc.errors import RpcError
from shared.tensors_torch import to_numpy
from shared.topology.algorithm import Optimizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
F = TypeVar("F", bound=Callable[..., Any])


def _in_megatron(method: F) -> F:
    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with megatron_device():
            return method(*args, **kwargs)

    return inside  # type: ignore[return-value]


class MegatronBackend:
    """See `backend.Backend`."""

    @_in_megatron
    def __init__(
        self, model_dir: Path, dtype: str, optimizer: Optimizer, options: BackendOptions, place: Place
    ) -> None:
        """Raises RpcError(bad_request) for a model it cannot load, ValueError for degrees that do not divide it."""
        torch.set_num_threads(options.threads)
        if dtype not in _DTYPES:
            raise RpcError(ErrorCode.BAD_REQUEST, f"dtype {dtype!r}: backend megatron has float32 and bfloat16")
        self.place = place
        self._dtype = _DTYPES[dtype]
        self._options, self._optimizer_options = options, optimizer
        self._source = model_dir
        self._config = architecture.read_config(model_dir)
        self._model = architecture.read(self._config)
        layout = place.layout
        self._model.check(layout)
        self._converter = Converter(self._model, layout.tp, layout.pp)
        self._files = files.ModelFiles(model_dir, self._converter.shapes)
        self._groups = Groups(place)
        engine = HAVE_TE and torch.cuda.is_available()
        config = transformer_config(self._model, self._dtype, place, engine=engine)
        frequencies = architecture.rotary_frequencies(self._config, self._model)
        model = PackedGPT(self._model, frequencies, config, place, engine=engine).to(options.device)
        for param in model.parameters():
            param.data = param.data.to(self._dtype)  # torch's norms begin in float32
        if options.recompute == "layers":
            model.recompute_layers()
        self._trained = Trained(model, self._converter, self._groups, optimizer)
        folder = options.scratch / f"rank-{place.rank}"
        self._shelves: dict[Part, Shelf] = {
            "parameters": Shelf(folder / "parameters.bin"),
            "gradients": Shelf(folder / "gradients.bin"),
            "optimizer": Shelf(folder / "optimizer.bin"),
        }
        self._trained.set_weights(self._files)
        self._trained.drop_gradients()

    @property
    def parameters(self) -> int:
        return self._converter.elements

    @property
    def model(self) -> nn.Module:
        """Megatron's wrapper around this rank's pieces."""
        wrapped: nn.Module = self._trained.model
        return wrapped

    @property
    def vocab_size(self) -> int:
        return self._model.vocab

    @_in_megatron
    def restart(self) -> None:
        """The weights of the model directory and fresh optimizer state."""
        self._back()
        self._trained.set_weights(self._files)
        self._trained.drop_gradients()

    # ---- passes

    @_in_megatron
    @torch.no_grad()
    def forward(self, sequences: Sequences, temperature: float) -> Array:
        """float32 [T], complete on every rank: rank 0, which publishes, may be of a stage without a head."""
        result = torch.zeros(len(sequences.token_ids), dtype=torch.float32, device=self._options.device)

        def keep(scores: Scores) -> Tensor:
            result[scores.tokens] = scores.logprobs.float()
            return scores.logprobs.sum()

        self._run(sequences, temperature, "none", keep, forward_only=True)
        return to_numpy(self._groups.from_last_stage(self._groups.sum_over_sequence_ranks(result)))

    @_in_megatron
    def forward_backward(
        self, sequences: Sequences, temperature: float, loss: TokenLoss, *, entropy: Entropy
    ) -> dict[str, float]:
        """Micro-batches never change the gradient: each adds its plain share to the buffers; ranks meet in `step`."""
        totals: dict[str, float] = {}

        def shared_loss(scores: Scores) -> Tensor:
            return self._on_every_rank(scores, loss, totals)

        self._run(sequences, temperature, entropy, shared_loss, forward_only=False)
        return totals

    def _on_every_rank(self, scores: Scores, loss: TokenLoss, totals: dict[str, float]) -> Tensor:
        """A scalar whose gradient is that of `loss`, which only one rank of a tensor-parallel group computes."""
        outputs = [scores.logprobs]
        if scores.entropy is not None and scores.entropy.requires_grad:
            outputs.append(scores.entropy)
        grads = torch.zeros((len(outputs), len(scores.tokens)), dtype=outputs[0].dtype, device=outputs[0].device)
        if self.place.counts:
            leaves = [each.detach().requires_grad_() for each in outputs]
            local = Scores(scores.tokens, leaves[0], leaves[1] if len(leaves) > 1 else scores.entropy)
            total, sums = loss(LocalScores(local, self._groups.sum_over_sequence_ranks))
            add_up(totals, sums)
            if total.requires_grad:
                found = torch.autograd.grad(total, leaves, allow_unused=True)
                for row, grad in zip(grads, found, strict=True):
                    if grad is not None:
                        row.copy_(grad)
        self._groups.first_of_tp(grads)
        return sum((each @ grad for each, grad in zip(outputs, grads, strict=True)), outputs[0].new_zeros(()))

    def _run(
        self,
        sequences: Sequences,
        temperature: float,
        entropy: Entropy,
        on_scores: Callable[[Scores], Tensor],
        *,
        forward_only: bool,
    ) -> None:
        """All micro-batches of this data-parallel rank through the pipeline. Ranks of other samples are not met here:
        collectives of a pass stay among tp, pp and cp, which run the same micro-batches.
        """
        batches = self._plan(sequences, temperature)
        if not batches:
            return
        one = torch.ones((), dtype=torch.int, device=self._options.device)

        def calculate(scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return on_scores(scores), one, {}  # three values and per-token loss: the schedule divides nothing

        def step(packed: Iterator[Packed], model: Any) -> tuple[Any, Callable[[Scores], Any]]:
            return model(next(packed)), calculate

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=(self._pack(batch, temperature, entropy) for batch in batches),
            model=[self._trained.model],
            num_microbatches=len(batches),
            seq_length=1,  # of fixed shapes: here they travel with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _plan(self, sequences: Sequences, temperature: float) -> list[tree.MicroBatch]:
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: log-probs need one above 0")
        if not len(sequences.lengths):
            return []
        return tree.plan(
            sequences.token_ids,
            sequences.lengths,
            sequences.loss_mask,
            max_tokens=self._options.max_tokens,
            hidden_size=self._model.hidden,
            share=self._groups.context is None,
        )

    def _pack(self, batch: tree.MicroBatch, temperature: float, entropy: Entropy) -> Packed:
        device, ranks = torch.device(self._options.device), self._groups.context
        if ranks is None:
            batch = self._even(batch)
            return Packed(batch, attention.to_trees(batch, device), temperature, entropy)
        cut = context.cut(batch, ranks.rank, ranks.size)
        cut = replace(cut, batch=self._even(cut.batch))
        return Packed(cut.batch, context.to_device(cut, ranks, device), temperature, entropy)

    def _even(self, batch: tree.MicroBatch) -> tree.MicroBatch:
        """As many nodes as sequence-parallel ranks can share; nobody looks at those added."""
        odd = len(batch.token_ids) % self.place.layout.tp
        if not odd or not self._trained.model.config.sequence_parallel:
            return batch
        zeros = np.zeros(self.place.layout.tp - odd, np.int64)
        token_ids, depths, scatter = (
            np.concatenate([each, zeros]) for each in (batch.token_ids, batch.depths, batch.scatter)
        )
        return replace(batch, token_ids=token_ids, depths=depths, scatter=scatter)

    # ---- updates

    @_in_megatron
    def step(self, step: int) -> Update:
        """Sum over ranks, clip, step, zero the gradients; training step `step` (from 1) sets the warm-up.

        Raises RpcError(bad_data) when the gradient is not finite: weights and optimizer state stay as they are.
        """
        self._trained.reduce()
        grad_norm = self._trained.norm()
        if not math.isfinite(grad_norm):
            self.drop_gradients()
            raise RpcError(
                ErrorCode.BAD_DATA,
                f"step {step} refused, weights untouched: gradient norm is {grad_norm}; look for extreme "
                "log-probs or advantages in its batch, or lower optimizer.lr",
            )
        lr = self.learning_rate(step)
        self._trained.update(grad_norm, lr)
        self.drop_gradients()
        return Update(grad_norm, lr)

    def learning_rate(self, step: int) -> float:
        """Linear from lr / warmup_steps at step 1 up to lr at step warmup_steps, then constant."""
        warmup = self._optimizer_options.warmup_steps
        return self._optimizer_options.lr * (min(1.0, step / warmup) if warmup else 1.0)

    @_in_megatron
    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        self.backload(frozenset(["gradients"]))
        self._trained.drop_gradients()

    # ---- state

    @_in_megatron
    def weights(self) -> dict[str, Tensor]:
        """On rank 0 the full weights; {} elsewhere."""
        return self._trained.weights()

    @_in_megatron
    def state(self) -> State:
        """Copies of weights and AdamW's state on rank 0."""
        return self._trained.state()

    @_in_megatron
    def load_state(self, state: State) -> None:
        """Take over a checkpoint. Raises RpcError(conflict) when it is of another model."""
        shapes = self._converter.shapes
        strange = sorted(shapes.keys() ^ state.weights.keys()) + [
            name for name in shapes.keys() & state.weights.keys() if shapes[name] != tuple(state.weights[name].shape)
        ]
        if strange:
            raise RpcError(
                ErrorCode.CONFLICT, f"weights of another model: {', '.join(strange[:3])} do not fit {self._source}"
            )
        self._back()
        self._trained.set_weights(state.weights.__getitem__)
        self._trained.set_optimizer(state.optimizer)
        self._trained.drop_gradients()

    @_in_megatron
    def export(self, folder: Path) -> None:
        """Configuration and weights, on rank 0; every rank must call."""
        weights = self._trained.weights()
        if self.place.rank == 0:
            files.write(folder, self._config, weights, self._dtype)

    # ---- memory

    def offload(self, parts: frozenset[Part]) -> int:
        """Bytes freed on this rank."""
        tensors: dict[Part, Callable[[], list[Tensor]]] = {
            "parameters": self._trained.tensors,
            "gradients": self._trained.gradient_buffers,
            "optimizer": self._trained.optimizer_tensors,
        }
        return sum(self._shelves[part].put(tensors[part]()) for part in sorted(parts) if not self._shelves[part].holds)

    def backload(self, parts: frozenset[Part]) -> int:
        """Bytes moved on this rank."""
        return sum(self._shelves[part].take() for part in sorted(parts))

    def _back(self) -> None:
        self.backload(frozenset(self._shelves))
