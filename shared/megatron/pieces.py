"""Holds this rank's pieces of a model, and runs micro-batches through the ranks of a model copy.

It does not deal with optimizers, losses or the bus. Transformer Engine is used if it is installed and CUDA is
available, with sequence parallelism if tp > 1. On a CPU the same layers run on gloo through `cpu_shims`, so everything
here must be called inside `megatron_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from proto.tensors import Array
from shared.megatron import architecture, files
from shared.megatron.converter import Converter, Weight
from shared.megatron.groups import Groups
from shared.megatron.model import Packed, PackedGPT, transformer_config
from shared.model import attention, context, tree
from shared.model.load import read_config
from shared.model.logprobs import Entropy, Scores, to_nodes
from shared.model.picks import IdsOf, PickedIds
from shared.model.stored import StoredNames
from shared.ranks.layout import RankPlace
from shared.rpc.errors import BadInput
from shared.topology.models import Head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Pieces:
    """The part of a folder's model that `place` holds. The weights are uninitialized until they are copied in."""

    def __init__(
        self,
        model_dir: Path,
        dtype: str,
        place: RankPlace,
        *,
        device: str,
        max_tokens: int,
        head: Head = "language",
    ) -> None:
        """`max_tokens` is the limit for one micro-batch. The process group of all ranks must be open.

        Raises RpcError(bad_request) if the model cannot be loaded, and ValueError for degrees that do not divide the
        dimensions that they split.
        """
        if dtype not in DTYPES:
            raise BadInput(f"dtype {dtype!r}: backend megatron supports float32 and bfloat16")
        self.place = place
        self.dtype = DTYPES[dtype]
        self.config = read_config(model_dir)
        """The configuration as read by Hugging Face."""
        if head == "value":
            self.config.tie_word_embeddings = False  # a value head is tied to nothing
        self.architecture = architecture.read(self.config, head)
        layout = place.layout
        self.architecture.check(layout)
        self.converter = Converter(self.architecture, layout.tp, layout.pp, layout.ep)
        self.stored = StoredNames(self.config) if self.architecture.experts is not None else None
        self.files = files.ModelFiles(model_dir, self.converter.shapes, self.stored)
        self.groups = Groups(place)
        engine = HAVE_TE and torch.cuda.is_available()
        settings = transformer_config(self.architecture, self.dtype, place, engine=engine)
        frequencies = architecture.rotary_frequencies(self.config, self.architecture)
        self.model = PackedGPT(self.architecture, frequencies, settings, place, engine=engine).to(device)
        for param in self.model.parameters():
            param.data = param.data.to(self.dtype)  # torch's norms are created in float32
        self._device = device
        self._max_tokens = max_tokens

    @property
    def weights(self) -> list[Weight]:
        """Weights of this rank's pipeline stage, including copies of another stage's weights."""
        mine = self.place.pp_rank
        return [weight for weight in [*self.converter.weights, *self.converter.copies] if weight.stage == mine]

    def mine(self, weight: Weight, parts: list[Tensor]) -> Tensor:
        """Return this rank's part of the full `parts`."""
        rank = self.place.ep_rank if weight.rule == "experts" else self.place.tp_rank
        return self.converter.split(weight, parts)[rank]

    @torch.no_grad()
    def copy_in(self, weights: Callable[[str], Tensor]) -> None:
        """Copy in the full tensors that `weights` returns by Hugging Face name."""
        params = dict(self.model.named_parameters())
        for weight in self.weights:
            param = params[weight.name]
            param.copy_(self.mine(weight, [weights(part) for part in weight.parts]).to(param.dtype))

    # ---- passes

    @torch.no_grad()
    def outputs(
        self, token_ids: Array, lengths: Array, loss_mask: Array, temperature: float, model: Any = None
    ) -> Tensor:
        """Return log p(token) of logits / temperature, or a value model's value of the state before the token, where
        the mask is 1, else 0: float32 [T], complete on every rank.

        `model` is a wrapper around `self.model` to run in its place.
        """
        result = torch.zeros(len(token_ids), dtype=torch.float32, device=self._device)

        def keep(scores: Scores) -> Tensor:
            result[scores.tokens] = scores.outputs.float()
            return scores.outputs.sum()

        self.run(token_ids, lengths, loss_mask, temperature, "none", keep, model=model, forward_only=True)
        return self.groups.from_last_stage(self.groups.sum_over_sequence_ranks(result))

    def run(
        self,
        token_ids: Array,
        lengths: Array,
        loss_mask: Array,
        temperature: float,
        entropy: Entropy,
        on_scores: Callable[[Scores], Tensor],
        *,
        others: IdsOf | None = None,
        model: Any = None,
        forward_only: bool,
    ) -> None:
        """Run all micro-batches of this data-parallel rank through the pipeline. The collectives of a pass involve only
        tp, pp and cp ranks, which run the same micro-batches, and ep ranks, which run equally many of the same sizes.
        Other ranks with other samples do not take part.
        """
        batches = self._plan(token_ids, lengths, loss_mask, temperature)
        if self.place.layout.ep > 1:
            sizes = self.groups.largest([len(batch.token_ids) for batch in batches])
            spare = [tree.unscored()] * (len(sizes) - len(batches))
            batches = [_padded(batch, size) for batch, size in zip([*batches, *spare], sizes, strict=True)]
        if not batches:
            return
        one = torch.ones((), dtype=torch.int, device=self._device)

        def calculate(scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            # With per-token loss, the schedule does not divide the loss if three values are returned.
            return on_scores(scores), one, {}

        def step(packed: Iterator[Packed], model: Any) -> tuple[Any, Callable[[Scores], Any]]:
            return model(next(packed)), calculate

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=(self._pack(batch, temperature, entropy, others) for batch in batches),
            model=[self.model if model is None else model],
            num_microbatches=len(batches),
            seq_length=1,  # used only for fixed shapes; here, shapes are sent with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _plan(self, token_ids: Array, lengths: Array, loss_mask: Array, temperature: float) -> list[tree.MicroBatch]:
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: log-probs need one above 0")
        if not len(lengths):
            return []
        return tree.plan(
            token_ids,
            lengths,
            loss_mask,
            max_tokens=self._max_tokens,
            hidden_size=self.architecture.hidden,
            share=self.groups.context is None,
            packs=attention.packs(torch.device(self._device)),
        )

    def _pack(self, batch: tree.MicroBatch, temperature: float, entropy: Entropy, others: IdsOf | None) -> Packed:
        device, ranks = torch.device(self._device), self.groups.context
        if ranks is None:
            batch = self._even(batch)
            layout = attention.to_trees(batch, device)
            return self._packed(batch, layout, temperature, entropy, others)
        cut = context.cut(batch, ranks.rank, ranks.size)
        cut = replace(cut, batch=self._even(cut.batch))
        return self._packed(cut.batch, context.to_cut(cut, ranks, device), temperature, entropy, others)

    def _packed(
        self,
        batch: tree.MicroBatch,
        layout: attention.Trees | context.Cut,
        temperature: float,
        entropy: Entropy,
        others: IdsOf | None,
    ) -> Packed:
        nodes = to_nodes(batch, torch.device(self._device))
        picks = PickedIds.of(batch, nodes.tokens, others) if others is not None and self.model.post_process else None
        return Packed(batch, nodes, layout, temperature, entropy, picks)

    def _even(self, batch: tree.MicroBatch) -> tree.MicroBatch:
        """Pad `batch` to a number of nodes that sequence-parallel ranks can share equally."""
        tp = self.place.layout.tp if self.model.config.sequence_parallel else 1
        return _padded(batch, -(-len(batch.token_ids) // tp) * tp)


def _padded(batch: tree.MicroBatch, size: int) -> tree.MicroBatch:
    """Return `batch` with `size` nodes. Nothing uses the added ones."""
    zeros = np.zeros(size - len(batch.token_ids), np.int64)
    token_ids, depths, scatter = (
        np.concatenate([array, zeros]) for array in (batch.token_ids, batch.depths, batch.scatter)
    )
    return replace(batch, token_ids=token_ids, depths=depths, scatter=scatter)
