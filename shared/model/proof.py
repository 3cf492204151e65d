"""Proves which passes compute the log-probs of a model as the model's own library does, one sequence at a time:
`python -m shared.model.proof FOLDER LONGEST LORA` prints a `Verdict` as a JSON line. LONGEST and LORA, a section
`policy.lora`, are JSON and may be null.

The proof computes with a reduced copy of the configuration (`reduced`) in which every parameter is random, and in
float64, also where the library computes in float32: what is left of a difference is not rounding. The sequences share
prefixes, and their lengths are on both sides of every window and of every length at which a model changes.

A proof for a language model also covers a value model of the same architecture. Both compute hidden states with the
same base model, and the proof compares log-probs and gradients that depend on these states through a random output
layer.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from shared.model import logprobs
from shared.model.adapter import planned
from shared.model.load import allow
from shared.model.logprobs import TokenScorer, vocabulary
from shared.model.plain_decoder import PlainDecoder, is_plain_decoder
from shared.model.reduced import Cannot, Reduced, described, on_meta, reductions
from shared.model.routing import attach
from shared.topology.lora import Lora
from shared.topology.passes import Passes, Verdict

TOLERANCE = 1e-9
"""Maximum difference of log-probs, in nats, and of gradients, relative to their norm."""
_SMALL = 1e-3
"""Share of the whole gradient's norm below which a parameter's gradient is compared with that share."""
_MICRO_BATCH = 150
"""Maximum nodes of a pass: all long sequences are in one, and the short ones in another."""
_GROUPS = ((1, (3, 2)), (4, (2, 3, 5)), (12, (2, 4, 5, 7)), (18, (3, 8)), (36, (3,)))
"""The length of every prompt, and of the answers to it. `reduced` has windows of 8 tokens, and changes at 16."""
_LONG = 18
"""A length beyond all changes. The last three sequences are longer."""
_FIRST_TOKEN, _ANSWER_TOKENS = 5, 4
Array = np.ndarray[Any, np.dtype[Any]]
_LOW = frozenset([torch.float32, torch.bfloat16, torch.float16])
_CASTS = frozenset([torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16])


class Exact(TorchFunctionMode):
    """Computes in float64 what the code inside wants in a shorter type."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        longer = tuple(torch.float64 if _is_low(value) else value for value in args)
        named = {key: torch.float64 if _is_low(value) else value for key, value in (kwargs or {}).items()}
        return func(*longer, **named)


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _LOW


@dataclass(frozen=True)
class Text:
    """Sequences: `token_ids` int64 [T], `lengths` int64 [S], `loss_mask` uint8 [T], and `weights` float64 [T] of the
    log-probs in the loss."""

    token_ids: Array
    lengths: Array
    loss_mask: Array
    weights: Tensor


class Result(NamedTuple):
    """Log-probs float64 [T], 0 where they are not scored, and the gradients of their weighted sum by parameter."""

    logprobs: Tensor
    gradients: dict[str, Tensor]


def prove(config: Any, longest: int | None = None) -> Verdict:
    """Return the verdict for models with `config`, a configuration of transformers.

    No sequence has more than `longest` tokens, so changes at greater lengths are not considered. A configuration that
    cannot be reduced gets the passes that assume nothing.
    """
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    reasons: list[str] = []
    usual = torch.get_default_dtype()
    for small in reductions(config, longest):
        if isinstance(small, Cannot):
            reasons.append(str(small))
            continue
        torch.set_default_dtype(torch.float64)
        try:
            with Exact():
                return _prove(small)
        except Exception as error:  # A library's model may raise anything, and another reduction may work.
            reasons.insert(0, described(error))
        finally:
            torch.set_default_dtype(usual)
    return Verdict(model=name, reasons=[f"no proof: {reasons[0]}"])


def _prove(small: Reduced) -> Verdict:
    model = _model(small)
    text = _text(vocabulary(model))
    wanted = _library(model, text)
    about: dict[str, Any] = {"model": type(model).__name__, "parameters": small.parameters, "layers": small.layers}
    if (error := _looks_ahead(model, text)) > TOLERANCE:
        return Verdict(**about, refused=f"the log-prob of a token depends on later tokens ({error:.2g} nats)")
    reasons: list[str] = []

    def holds(what: str, passes: Passes, run: Callable[[nn.Module, Text], Result] = _own) -> bool:
        allow(model, passes)
        try:
            why = _difference(run(model, text), wanted)
        except Exception as error:  # as above
            why = described(error)
        if why:
            reasons.append(f"{what}: {why}")
        return not why

    if not holds("single", Passes()):
        why = reasons[0].partition(": ")[2]
        return Verdict(**about, refused=f"a sequence's log-probs depend on those before it in the same process ({why})")
    laid_out = next(
        (layout for layout in ("packed", "padded") if holds(layout, Passes(sequences=cast(Any, layout)))),
        "single",
    )
    head = "blocks" if holds("head in blocks", Passes(sequences=cast(Any, laid_out), head="blocks")) else "whole"
    decoder = "modules"
    if is_plain_decoder(model):
        passes = Passes(sequences=cast(Any, laid_out), head=cast(Any, head), decoder="written-out")
        if holds("written-out decoder", passes, lambda model, text: Result(_decoded(model, text), wanted.gradients)):
            decoder = "written-out"
    return Verdict(
        **about, sequences=cast(Any, laid_out), head=cast(Any, head), decoder=cast(Any, decoder), reasons=reasons
    )


def _model(small: Reduced) -> nn.Module:
    """Return a model in which every parameter is random, norms, biases and scales included."""
    generator = torch.Generator().manual_seed(0)
    model: Any = cast(Any, AutoModelForCausalLM).from_config(
        deepcopy(small.config), dtype=torch.float64, experts_implementation="eager"
    )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.2 * noise)
        for name, buffer in model.state_dict().items():
            if name not in parameters and buffer.is_floating_point():
                noise = 0.1 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
                # The zeros of a buffer may be a mask, unless it has nothing else.
                buffer.copy_(buffer * (1 + noise) if buffer.any() else noise)
    model.get_input_embeddings().padding_idx = None
    return cast(nn.Module, model.double().eval())


def _text(vocab: int) -> Text:
    random = np.random.default_rng(0)
    ids: list[int] = []
    lengths: list[int] = []
    mask: list[int] = []
    for prompt, answers in _GROUPS:
        begin = random.integers(_FIRST_TOKEN, vocab, size=prompt).tolist()
        for answer in answers:
            # Few different tokens, so that answers also share prefixes.
            ids += begin + random.integers(_FIRST_TOKEN, _FIRST_TOKEN + _ANSWER_TOKENS, size=answer).tolist()
            lengths.append(prompt + answer)
            mask += [0] * prompt + [1] * answer
    weights = torch.from_numpy(random.normal(size=len(ids)))
    return Text(np.array(ids), np.array(lengths), np.array(mask, np.uint8), weights)


def _library(model: nn.Module, text: Text) -> Result:
    """Score every sequence alone with the model's own forward pass."""
    parts: list[Tensor] = []
    ends = np.cumsum(text.lengths)

    def run() -> None:
        for ids, end in zip(_sequences(text), ends, strict=True):
            logits = cast(Any, model)(input_ids=ids[None], use_cache=False).logits[0, :-1]
            scored = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            scored = torch.cat([scored.new_zeros(1), scored]) * torch.from_numpy(text.loss_mask[end - len(ids) : end])
            parts.append(scored.detach())
            cast(Any, (scored * text.weights[end - len(ids) : end]).sum()).backward()

    return _with_gradients(model, lambda: torch.cat(parts), run)


def _own(model: nn.Module, text: Text) -> Result:
    """Score with the passes that the model allows, with blocks of the head of few rows."""
    scorer = TokenScorer(model)
    computed = torch.zeros(len(text.token_ids), dtype=torch.float64)
    with patch.object(logprobs, "MAX_LOGITS", 7 * vocabulary(model)), patch.object(logprobs, "checkpoint", _checkpoint):
        batches = scorer.plan(text.token_ids, text.lengths, text.loss_mask, 1.0, _MICRO_BATCH)

        def run() -> None:
            for batch in batches:
                scores = scorer.score(batch, 1.0, "none")
                computed[scores.tokens] = scores.outputs.detach()
                cast(Any, (scores.outputs * text.weights[scores.tokens]).sum()).backward()

        return _with_gradients(model, lambda: computed, run)


def _checkpoint(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Do as torch's `checkpoint`, exactly: autograd runs code again without the modes of the forward pass."""

    def exactly(*arguments: Any) -> Any:
        with Exact():
            return run(*arguments)

    return checkpoint(exactly, *arguments, **options)


def _decoded(model: nn.Module, text: Text) -> Tensor:
    """Return the log-probs, float64 [T], of the written-out decoder: half of every sequence at once, and the rest token
    by token."""
    decoder, parts = PlainDecoder(model), list[Tensor]()
    with torch.inference_mode():
        for ids in _sequences(text):
            cos, sin = decoder.angles(len(ids))
            half = len(ids) // 2
            hidden, pasts = decoder.begin(ids[None, :half], cos[:half], sin[:half], None)
            rows = [hidden[0]]
            for past in pasts:
                past.keys, past.values = (
                    nn.functional.pad(room, (0, 0, 0, len(ids) - half)) for room in (past.keys, past.values)
                )
            for at in range(half, len(ids) - 1):
                rows.append(
                    decoder.go_on(
                        ids[at : at + 1],
                        cos[at : at + 1],
                        sin[at : at + 1],
                        pasts,
                        at,
                        torch.zeros(1, 1, at + 1, dtype=torch.float64),
                    )
                )
            scored = decoder.logits(torch.cat(rows)).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            parts += [scored.new_zeros(1), scored]
    return (torch.cat(parts) * torch.from_numpy(text.loss_mask)).clone()


def _with_gradients(model: nn.Module, values: Callable[[], Tensor], run: Callable[[], None]) -> Result:
    model.zero_grad()
    run()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return Result(values(), gradients)


def _looks_ahead(model: nn.Module, text: Text) -> float:
    """Return how much the log-probs of a sequence's first tokens change without its last ones, for a short and for
    several long sequences.

    All lengths of a sequence are on the same side of every length at which a model changes.
    """
    errors: list[float] = []
    every = list(_sequences(text))
    with torch.no_grad():
        for ids, ends in ((every[0], (-2,)), *((long, (_LONG, -2)) for long in every[-3:])):
            whole = cast(Any, model)(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            for end in ends:
                cut = cast(Any, model)(input_ids=ids[None, :end], use_cache=False).logits[0].log_softmax(-1)
                errors.append(float((whole[: len(cut)] - cut).abs().max()))
    return max(errors)


def _sequences(text: Text) -> Iterator[Tensor]:
    ends = np.cumsum(text.lengths)
    for begin, end in zip(ends - text.lengths, ends, strict=True):
        yield torch.from_numpy(text.token_ids[begin:end])


def _difference(result: Result, wanted: Result) -> str:
    """Return the largest difference above the tolerance, or an empty string."""
    error = float((result.logprobs - wanted.logprobs).abs().max())
    if not error <= TOLERANCE:  # so that NaN counts as a difference
        return f"log-probs differ by {error:.2g} nats"
    whole = math.sqrt(sum(float(gradient.square().sum()) for gradient in wanted.gradients.values()))
    for name in sorted(result.gradients.keys() | wanted.gradients.keys()):
        zero = torch.zeros(())
        mine, its = (one.gradients.get(name, zero) for one in (result, wanted))
        # Some gradients are zero but for rounding, such as that of a bias of attention keys.
        error = float((mine - its).norm()) / max(float(its.norm()), _SMALL * whole)
        if not error <= TOLERANCE:
            return f"gradients differ by {error:.2g} of their norm ({name})"
    return ""


def main(arguments: Sequence[str]) -> None:
    cast(Any, logging).set_verbosity_error()
    torch.set_num_threads(1)
    config = cast(Any, AutoConfig).from_pretrained(arguments[0], local_files_only=True, trust_remote_code=False)
    longest, lora = map(msgspec.json.decode, arguments[1:])
    begun = time.process_time()
    verdict = prove(config, longest)
    whole = on_meta(config)
    timed = msgspec.structs.replace(
        verdict,
        cpu_s=round(time.process_time() - begun, 2),
        adapter=None if lora is None else planned(whole, Lora.model_validate(lora)),
        unwatched=attach(whole),
    )
    print(msgspec.json.encode(timed).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
