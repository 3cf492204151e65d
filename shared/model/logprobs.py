"""Computes one output per token of ragged sequences: log-probs of a language model, values of a value model. This is
the hot path of the trainer and the reference.

Where the model's passes allow it (`shared.topology.passes`), common prefixes are computed once (`tree`), and the head
runs only where a scored token follows. Up to rounding, the result equals that of scoring every sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.model import attention, context, tree
from shared.model.attention import Trees
from shared.model.context import ContextRank, Cut, CutBatch
from shared.model.load import passes_of
from shared.model.picks import IdsOf, Likeliest, PickedIds, largest, picked
from shared.model.routing import Routed, RouterWatch, routers_of
from shared.model.tree import GivenTargets, MicroBatch, head_blocks
from shared.model.value_head import base_model, value_head
from shared.tensors_torch import to_device

Array = np.ndarray[Any, np.dtype[Any]]
Entropy = Literal["none", "value", "gradient"]
"""How entropies are computed: not at all, as values for a metric, or with gradients for a loss."""

MAX_LOGITS = 1 << 26
"""Maximum number of elements of one float32 block of logits (256 MiB). Above it, the head runs in blocks, which are
recomputed in the backward pass."""
GPU_LOGITS = 4
"""Factor by which this limit is higher on a GPU: with a vocabulary of 152k, a block has 1,766 rows instead of 441. The
effect has not been measured yet."""


@dataclass(frozen=True)
class Scores:
    """The result for one micro-batch: `tokens` int64 [M], positions in the caller's flat arrays; `outputs` and
    `entropy` float32 [M] (float64 for a model in float64).

    `outputs` are what the model's head computes for the tokens: the log-probs of a language model, or the values that a
    value model gives to the states before them. `entropy` is the entropy of the distribution from which the token was
    drawn, or None if not requested or if the model is a value model. `others` [M, k] are the log-probs of other tokens
    of the vocabulary, if requested, and `other_ids` int64 [M, k] their ids, if the head chose them. `routed` is what
    the routers did, if they were watched.
    """

    tokens: Tensor
    outputs: Tensor
    entropy: Tensor | None
    others: Tensor | None = None
    other_ids: Tensor | None = None
    routed: Routed | None = None


@dataclass(frozen=True)
class Routing:
    """That the routers of a mixture of experts are watched. `given` uint8 [T, W] are the routes that the tokens must
    take (`routing.Routers.packed`); None: the routers choose. The routes of all tokens that are inputs are written into
    `record` uint8 [T, W]."""

    given: Array | None = None
    record: Array | None = None


@dataclass(frozen=True)
class Nodes:
    """The arrays of a `MicroBatch` of the same names, as int64 tensors on the device that computes it.
    Those of its blocks belong to attention."""

    token_ids: Tensor
    depths: Tensor
    predictors: Tensor
    child_predictor: Tensor
    child_token: Tensor
    tokens: Tensor
    token_child: Tensor


class HeadOutputs(NamedTuple):
    """What a head computes for a micro-batch of C children of P predictors: `outputs` [C], and what was requested:
    `entropy` [P], `others` [P, k] with their ids, or [M, k] for the ids of `PickedIds`, in their order."""

    outputs: Tensor
    entropy: Tensor | None = None
    others: Tensor | None = None
    other_ids: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[HeadOutputs]) -> HeadOutputs:
        """Return the outputs of consecutive blocks as one."""
        columns: Any = zip(*parts, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def of_tokens(self, nodes: Nodes, asked: Likeliest | PickedIds | None) -> Scores:
        """Return the outputs for the tokens of the micro-batch."""

        def spread(values_P: Tensor | None) -> Tensor | None:
            return None if values_P is None else values_P[nodes.child_predictor][nodes.token_child]

        others = self.others[asked.inverse] if isinstance(asked, PickedIds) and self.others is not None else None
        return Scores(
            nodes.tokens,
            self.outputs[nodes.token_child],
            spread(self.entropy),
            spread(self.others) if others is None else others,
            spread(self.other_ids),
        )


def to_nodes(batch: MicroBatch, device: torch.device) -> Nodes:
    """Return the arrays of `batch` on `device`, moved in one copy."""
    return Nodes(*to_device([getattr(batch, field.name) for field in fields(Nodes)], device))


def token_logprobs(
    model: nn.Module,
    token_ids: Array | Tensor,
    lengths: Array | Tensor,
    loss_mask: Array | Tensor,
    temperature: float,
    max_tokens: int,
    *,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(token_t | earlier tokens in its sequence) from logits / `temperature`, or 0 where `loss_mask` is 0.

    `token_ids` int [T] holds S concatenated sequences; `lengths` int [S]; `loss_mask` [T]. Returns float32 [T] and,
    with `with_entropy`, the entropies float32 [T]. `max_tokens` limits one forward pass. The result is differentiable
    if gradients are enabled, in which case the graphs of all micro-batches are alive at once; a trainer uses `score`
    instead. Raises ValueError if the sizes of the arrays differ or the first token of a sequence is to be scored.
    """
    total = len(token_ids)
    device = next(model.parameters()).device
    entropies: Entropy = "value" if with_entropy else "none"
    parts = list(score(model, token_ids, lengths, loss_mask, temperature, max_tokens, entropy=entropies))
    if not parts:
        zeros = torch.zeros(total, device=device)
        return zeros, zeros.clone() if with_entropy else None
    where = torch.cat([part.tokens for part in parts])
    logprobs = torch.cat([part.outputs for part in parts])
    result = torch.zeros(total, device=device, dtype=logprobs.dtype).index_copy(0, where, logprobs)
    if not with_entropy:
        return result, None
    entropy = torch.cat([cast(Tensor, part.entropy) for part in parts])
    return result, torch.zeros(total, device=device, dtype=entropy.dtype).index_copy(0, where, entropy)


def score(
    model: nn.Module,
    token_ids: Array | Tensor,
    lengths: Array | Tensor,
    loss_mask: Array | Tensor,
    temperature: float,
    max_tokens: int,
    *,
    entropy: Entropy = "none",
    others: Likeliest | None = None,
) -> Iterator[Scores]:
    """Yield the scores, one micro-batch at a time.

    The caller must run the backward pass of each micro-batch before it requests the next one.
    """
    scorer = TokenScorer(model)
    for batch in scorer.plan(_numpy(token_ids), _numpy(lengths), _numpy(loss_mask), temperature, max_tokens):
        yield scorer.score(batch, temperature, entropy, others)


class TokenScorer(nn.Module):
    """A causal model whose forward pass maps a micro-batch to log-probs, computing the output layer in chunks, or to
    values.

    It is a module, so that module wrappers (sharding, hooks) cover the whole pass. The model's `passes_of` decide how
    it is computed. A value head reads the hidden states of the base model, whatever they say about the head.
    """

    def __init__(self, model: nn.Module, ranks: ContextRank | None = None) -> None:
        """With `ranks`, split every sequence across them. Raises ValueError if the model's passes do not support
        that."""
        super().__init__()
        self.model = model
        self._ranks = ranks
        self._passes = passes_of(model)
        if ranks is not None and self._passes.sequences != "packed":
            raise ValueError(
                f"{type(model).__name__}: context parallelism needs passes.sequences: packed, which is not "
                "proved for this model; use cp 1"
            )

    def plan(
        self,
        token_ids: Array,
        lengths: Array,
        loss_mask: Array,
        temperature: float,
        max_tokens: int,
        targets: GivenTargets | None = None,
        routes: Array | None = None,
    ) -> list[MicroBatch]:
        """Return the micro-batches with tokens to score, the same on all ranks of a context group. For `targets` and
        `routes`, see `tree.plan`."""
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: must be above 0")
        single = self._passes.sequences == "single"
        return tree.plan(
            token_ids,
            lengths,
            loss_mask,
            max_tokens=1 if single else max_tokens,
            hidden_size=int(getattr(text_config(self.model), "hidden_size", 1024)),
            share=self._passes.sequences == "packed" and self._ranks is None,
            whole=single,
            packs=attention.packs(next(self.model.parameters()).device),
            targets=targets,
            routes=routes,
        )

    def score(
        self,
        batch: MicroBatch,
        temperature: float,
        entropy: Entropy,
        others: Likeliest | IdsOf | None = None,
        routing: Routing | None = None,
    ) -> Scores:
        """Run the model over `batch`. With context ranks, this rank runs only its part, which may contain no scored
        token."""
        cut = None if self._ranks is None else context.cut(batch, self._ranks.rank, self._ranks.size)
        part = batch if cut is None else cut.batch
        nodes = to_nodes(part, next(self.model.parameters()).device)
        asked = others if others is None or isinstance(others, Likeliest) else PickedIds.of(part, nodes.tokens, others)
        watch = None if routing is None else self._watch(part, nodes, routing)
        made: HeadOutputs = self(part, cut, nodes, temperature, entropy, asked, watch)
        # Where sequences share a prefix, several tokens belong to one child.
        scores = made.of_tokens(nodes, asked)
        routers = routers_of(self.model)
        if routing is None or watch is None or routers is None:
            return scores
        routed = watch.result()
        if routing.record is not None:
            routing.record[part.input_tokens] = routers.packed(routed.routes).cpu().numpy()[part.input_nodes]
        return replace(scores, routed=routed)

    def _watch(self, part: MicroBatch, nodes: Nodes, routing: Routing) -> RouterWatch | None:
        """Return the watch of the routers for a micro-batch, or None if the model has none. A node counts as often as
        it predicts a token."""
        routers = routers_of(self.model)
        if routers is None:
            return None
        size, device = len(part.token_ids), nodes.predictors.device
        times = np.bincount(part.predictors[part.child_predictor[part.token_child]], minlength=size)
        given = None
        if routing.given is not None:
            packed = np.zeros((size, routing.given.shape[1]), np.uint8)
            packed[part.input_nodes] = routing.given[part.input_tokens]
            (given,) = to_device([routers.unpacked(packed)], device)
        padded = self._passes.sequences != "packed"
        arrays = to_device([times.astype(np.float64), *([part.scatter] if padded else [])], device)
        slots = sum(block.rows * block.longest for block in part.blocks) if padded else size
        return RouterWatch(routers, arrays[0], given, arrays[1] if padded else None, slots)

    def forward(
        self,
        batch: MicroBatch,
        cut: CutBatch | None,
        nodes: Nodes,
        temperature: float,
        entropy: Entropy,
        asked: Likeliest | PickedIds | None,
        watch: RouterWatch | None = None,
    ) -> HeadOutputs:
        """Return what the head computes for `batch`. `score` calls this."""
        model, device, values = self.model, nodes.predictors.device, value_head(self.model)
        blocks = values is not None or self._passes.head == "blocks"
        if cut is not None and self._ranks is not None:
            out_PX = _run_packed(model, context.to_cut(cut, self._ranks, device), nodes, watch, logits=not blocks)
        elif self._passes.sequences == "packed":
            out_PX = _run_packed(model, attention.to_trees(batch, device), nodes, watch, logits=not blocks)
        else:
            out_PX = _run_padded(model, batch, nodes, watch, logits=not blocks)
        if values is not None:
            return HeadOutputs(values(out_PX)[nodes.child_predictor])
        most = max(1, max_logits(device.type) // vocabulary(model))
        if not blocks:
            return _gather(out_PX, nodes.child_predictor, nodes.child_token, temperature, entropy, asked)
        if len(batch.predictors) <= most:
            logits_PV = _logits(model, out_PX)
            return _gather(logits_PV, nodes.child_predictor, nodes.child_token, temperature, entropy, asked)
        parts: list[HeadOutputs] = []
        for rows, children in head_blocks(batch, most):
            target, token = nodes.child_predictor[children] - rows.start, nodes.child_token[children]
            mine = asked.block(rows, children) if isinstance(asked, PickedIds) else asked

            def block(
                hidden: Tensor,
                target: Tensor = target,
                token: Tensor = token,
                mine: Likeliest | PickedIds | None = mine,
            ) -> HeadOutputs:
                return _gather(_logits(model, hidden), target, token, temperature, entropy, mine)

            parts.append(checkpoint(block, out_PX[rows], use_reentrant=False, preserve_rng_state=False))
        return HeadOutputs.joined(parts)


def max_logits(device: str) -> int:
    """Return the maximum number of logits to compute at a time. It is higher on a GPU, whose kernels need more work at
    once."""
    return MAX_LOGITS * (GPU_LOGITS if device == "cuda" else 1)


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the part of the model that reads and writes text."""
    return cast(Any, model).config.get_text_config()


def vocabulary(model: nn.Module) -> int:
    """Return the number of tokens of the model's vocabulary."""
    return int(text_config(model).vocab_size)


class _BaseOutput:
    """The result of a base model that has nothing but hidden states, by name or by number."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _logits(model: nn.Module, hidden_PX: Tensor) -> Tensor:
    """Return logits [P, V] for the results [P, hidden] of the base model, by the model's own forward pass around it.

    The head alone would not do: some models scale or cap its results.
    """
    base = cast(Any, model).base_model
    before = vars(base).pop("forward", None)
    base.forward = lambda *_, **__: _BaseOutput(hidden_PX[None])
    try:
        ids = torch.zeros(1, len(hidden_PX), dtype=torch.long, device=hidden_PX.device)
        return cast(Tensor, model(input_ids=ids, use_cache=False).logits[0])
    finally:
        del base.forward
        if before is not None:
            base.forward = before


def _gather(
    logits_PV: Tensor,
    child_predictor: Tensor,
    child_token: Tensor,
    temperature: float,
    entropy: Entropy,
    asked: Likeliest | PickedIds | None,
) -> HeadOutputs:
    scaled_PV = logits_PV if logits_PV.dtype == torch.float64 else logits_PV.float()
    if temperature != 1.0:
        scaled_PV = scaled_PV / temperature
    logprobs_PV = scaled_PV.log_softmax(-1)
    logprobs_C = logprobs_PV.view(-1)[child_predictor * logprobs_PV.shape[1] + child_token]
    others = other_ids = None
    if isinstance(asked, Likeliest):
        other_ids, others = largest(logprobs_PV, asked)
    elif asked is not None:
        others = picked(logprobs_PV, asked)
    if entropy == "none":
        return HeadOutputs(logprobs_C, None, others, other_ids)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return HeadOutputs(logprobs_C, -(logprobs_PV.exp() * logprobs_PV).sum(-1), others, other_ids)


def _run_packed(
    model: nn.Module, layout: Trees | Cut, nodes: Nodes, watch: RouterWatch | None, *, logits: bool
) -> Tensor:
    """Return [P, V] logits, or [P, hidden] if `logits` is false. A `Cut` is this rank's part of every sequence."""
    name, own = (context.NAME, "cut") if isinstance(layout, Cut) else (attention.NAME, "trees")
    arguments: dict[str, Any] = {
        "input_ids": nodes.token_ids[None],
        "position_ids": nodes.depths[None],
        "use_cache": False,
        own: layout,
    }
    with attention.using(model, name), _over(watch, len(nodes.token_ids)):
        if logits:
            return cast(Tensor, model(**arguments).logits[0, nodes.predictors])
        return cast(Tensor, base_model(model)(**arguments).last_hidden_state[0, nodes.predictors])


def _over(watch: RouterWatch | None, rows: int) -> AbstractContextManager[None]:
    return nullcontext() if watch is None else watch.over(rows)


def _run_padded(
    model: nn.Module, batch: MicroBatch, nodes: Nodes, watch: RouterWatch | None, *, logits: bool
) -> Tensor:
    """Do the work of `_run_packed` for models that cannot be packed. Every row is one sequence, padded on the right if
    the micro-batch has several."""
    scatter, *gathers = to_device([batch.scatter, *(block.gather for block in batch.blocks)], nodes.token_ids.device)
    hidden: list[Tensor] = []
    for block, slots in zip(batch.blocks, gathers, strict=True):
        ids_RL = nodes.token_ids[slots].view(block.rows, block.longest)
        with _over(watch, len(slots)):
            run = model if logits else base_model(model)
            output = run(input_ids=ids_RL, use_cache=False)
        hidden.append((output.logits if logits else output.last_hidden_state).flatten(0, 1))
    return torch.cat(hidden)[scatter[nodes.predictors]]


def _numpy(values: Array | Tensor) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
