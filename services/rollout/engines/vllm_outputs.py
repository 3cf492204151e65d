"""Reads the samples of vLLM's finished and unfinished requests. This module changes nothing in vLLM.

Only this module knows how vLLM 0.32 stores unfinished requests, because vLLM has no call that returns them. The
alternative would be to request outputs at every step, which would cost as much for each token as a note of an
unfinished sample costs now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proto.tensors import Array
from services.rollout.engine import FinishReason, Generation, PromptScores


def generation(output: Any, began: int, *, spans: bool) -> Generation:
    """Return the generation for a finished vLLM CompletionOutput.

    `began` is the number of swaps when the block began. `spans` says whether more swaps followed, in which case the
    number of swaps must be read for each token.
    """
    spans_made = [(int(span.version), span.end - span.start) for span in output.weight_versions] if spans else []
    return _made(output.token_ids, output.logprobs, spans_made, began, _reason(output))


def prompt_scores(output: Any, token_ids: Array, top: int) -> PromptScores:
    """Return the scores in a RequestOutput, which has the log-probs of each token and of the `top` likeliest ones."""
    rows = output.prompt_logprobs[1:]
    likeliest = [sorted(row.items(), key=lambda item: (-item[1].logprob, item[0]))[:top] for row in rows]
    return PromptScores(
        np.array([row[token].logprob for token, row in zip(token_ids[1:].tolist(), rows, strict=True)], np.float32),
        np.array([[token for token, _ in row] for row in likeliest], np.int32).reshape(len(rows), top),
        np.array([[each.logprob for _, each in row] for row in likeliest], np.float32).reshape(len(rows), top),
        np.zeros((len(rows), 0), np.float32),
    )


def under_way(
    processor: Any,
    finished: Mapping[str, Any],
    names: Sequence[str],
    samples: int,
    began: int,
    proved: int,
    *,
    spans: bool,
) -> list[list[Generation]]:
    """Return the generations so far for the requests in `names`, `samples` generations for each request.

    `processor` is the engine's output processor, and `finished` contains, by name, the RequestOutputs that the
    processor has dropped. `began` is the number of swaps when the block began. Tokens sampled after more than `proved`
    swaps are left out. `spans` says whether swaps apply to running samples.
    """
    by_place: dict[tuple[str, int], Generation] = {}
    ended = [(name, completion) for name, output in finished.items() for completion in output.outputs]
    ended += [
        (parent.external_req_id, each)  # None: unfinished
        for parent in processor.parent_requests.values()
        for each in parent.output_aggregator
        if each is not None
    ]
    for name, output in ended:
        made_by = [(int(span.version), span.end - span.start) for span in output.weight_versions or () if spans]
        by_place[name, output.index] = _made(output.token_ids, output.logprobs, made_by, began, _reason(output), proved)
    for state in processor.request_states.values():
        token_ids = state.detokenizer.output_token_ids
        starts = state.weight_version_starts if spans else []
        # `ends` has one more entry than `starts` if nothing has been sampled yet.
        ends = [start for _, start in starts[1:]] + [len(token_ids)]
        made_by = [(int(version), end - start) for (version, start), end in zip(starts, ends, strict=False)]
        logprobs = state.logprobs_processor.logprobs
        made = _made(token_ids, logprobs, made_by, began, FinishReason.UNFINISHED, proved)
        by_place[state.external_req_id, state.request_index] = made
    return [[by_place[name, index] for index in range(samples)] for name in names]


def _reason(output: Any) -> FinishReason:
    return FinishReason.STOP if output.finish_reason == "stop" else FinishReason.LENGTH


def _made(
    token_ids: Sequence[int],
    logprobs: Any,
    spans: Sequence[tuple[int, int]],
    began: int,
    finish_reason: FinishReason,
    proved: int | None = None,
) -> Generation:
    """Return a generation. `spans` lists (number of preceding swaps, number of tokens) in order. If it is empty, all
    tokens were sampled after `began` swaps."""
    count = len(token_ids)
    of_token: Array = np.full(count, began, np.int32)
    if spans:
        of_token = np.repeat(np.array([version for version, _ in spans], np.int32), [tokens for _, tokens in spans])
    if proved is not None:
        count = min(count, int((of_token <= proved).sum()))
    return Generation(
        token_ids=np.array(token_ids[:count], np.int32),
        logprobs=np.array(logprobs.logprobs[:count] if count else (), np.float32),
        finish_reason=finish_reason if count == len(token_ids) else FinishReason.UNFINISHED,
        swaps=of_token[:count],
    )
