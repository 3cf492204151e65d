"""A request to sample for a client, and its result. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import xxhash

from proto.messages import WeightsRef
from proto.tensors import Array

_SEED_MASK = (1 << 63) - 1
ALLOWANCE_S = 600.0


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A prompt, and how to sample from it. `rollout` checks the ranges (`SampleTokens`).

    `version` None is the base, without an adapter. `token_ids` int32 [T] is the whole prompt. `max_tokens` 0: up to the
    end of the context. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `stop` and `stop_ids` end a sample;
    so do the model's own end tokens if `ends`. What follows is that of the version at temperature 1: `prompt_logprobs`,
    the `top_prompt_logprobs` likeliest tokens of each place of the prompt, the log-probs of `targets` int32 [T - 1, K]
    in the places after the first, where -1 is no token, and the `top_logprobs` likeliest tokens of each place of a
    sample. With `texts`, the result has texts.
    """

    version: WeightsRef | None
    token_ids: Array
    seed: int
    samples: int = 1
    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ends: bool = True
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    targets: Array | None = None
    top_logprobs: int = 0
    texts: bool = False
    allowance_s: float = ALLOWANCE_S
    """Seconds after which the request is given up."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sample of N tokens.

    `token_ids` int32 [N] ends with the token that ended it, if one did. `logprobs` float32 [N] are those of the
    distribution that was sampled from, after temperature, `top_k` and `top_p`, and at temperature 1 if greedy.
    `versions` int32 [N] are the steps of the version that sampled each token, or -1 for the base. `reason` is "stop" or
    "length". `top_ids` int32 and `top_logprobs` float32, both [N, k], are the likeliest tokens at temperature 1.
    """

    token_ids: Array
    logprobs: Array
    versions: Array
    reason: str
    text: str = ""
    top_ids: Array | None = None
    top_logprobs: Array | None = None


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """The samples of a prompt of T tokens, and what else was asked for.

    `prompt_logprobs` float32 [T] begins with NaN. `top_ids` int32 and `top_logprobs` float32, both [T, k], are the
    likeliest tokens at each place, the likeliest first; the first place has -1 and NaN. `target_logprobs` float32
    [T - 1, K] has 0 where no target was asked for.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    target_logprobs: Array | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, Array], reasons: Sequence[str], texts: Sequence[str]) -> SampledPrompt:
        """Return the result in a reply's arrays (`SampledTokens`)."""
        ends = list(accumulate(arrays["lengths"].tolist()))
        parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        top_ids, top_logprobs = arrays.get("sample_top_ids"), arrays.get("sample_top_logprobs")
        return cls(
            [
                SampledSequence(
                    arrays["token_ids"][part],
                    arrays["logprobs"][part],
                    arrays["versions"][part],
                    reason,
                    text,
                    None if top_ids is None else top_ids[part],
                    None if top_logprobs is None else top_logprobs[part],
                )
                for part, reason, text in zip(parts, reasons, texts or [""] * len(parts), strict=True)
            ],
            _after_first(arrays.get("prompt_logprobs"), np.nan),
            _after_first(arrays.get("top_ids"), -1),
            _after_first(arrays.get("top_logprobs"), np.nan),
            arrays.get("target_logprobs"),
        )


def _after_first(array: Array | None, first: float) -> Array | None:
    """Return the array with a row of `first` before it."""
    return None if array is None else np.concatenate([np.full((1, *array.shape[1:]), first, array.dtype), array])


def version_name(ref: WeightsRef | None) -> str:
    """Return the name of a version, or an empty string for the base."""
    return "" if ref is None else ref.task_id


def derived_seed(model: str, version: str, session: int, index: int) -> int:
    """Return the seed of a sample whose client gave none. The same request of a session, sent again, gets the same."""
    text = f"{model}\n{version}\n{session}\n{index}"
    return xxhash.xxh3_64_intdigest(text.encode()) & _SEED_MASK
