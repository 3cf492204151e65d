"""Provides a frozen model that a server with OpenAI's completions interface runs, such as vLLM.

The server must return `prompt_logprobs` for prompts of token ids, as vLLM 0.32 does. These are the log-softmax of the
model's logits, whatever temperature a request names. `load` proves what can be proved: that the server reads the
policy's token ids as the policy does, and that it returns log-probs and not logits.

A server that is away (no connection, silence, status 429 or at least 500) is asked again until it answers; `Away` says
for how long. A pause that it asks for (Retry-After) is kept, up to `reward.retry.limit_s`. Any other refusal ends the
run. An answer that does not fit the request is not used; the lease is handed back, and the server counts as away until
an answer fits.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from proto.messages import ErrorCode
from proto.tensors import Array
from services.reference.away import Away
from shared.http_client import HttpClient, HttpRefused
from shared.model.picks import Likeliest
from shared.rpc.errors import BadInput, RpcError
from shared.tokenizer import load_tokenizer, special_tokens
from shared.topology.reward import RewardRetry
from shared.topology.services import TeacherServer

CONNECTIONS = 16
"""Maximum number of sequences that the server scores at a time."""
SILENCE_S = 120.0
"""Maximum seconds to wait for the next bytes of an answer."""
_POLL_S = 0.5
_PROVED_TOKENS, _PROMPT_TOKENS = 256, 64
"""Number of tokens whose texts are compared, and how many of them are in one prompt."""
_SHOWN_TOKENS = 3
_ABOVE_ONE = 1e-3
"""Amount by which probabilities may exceed 1, and log-probs 0, through rounding."""
_UNLIKELY = -100.0
"""Log-prob of ids that fill up the likeliest if the server names too few of the policy's."""
_TOO_MANY, _SERVER_ERROR = 429, 500
_KEY = "services.teacher.server"
Entry = Mapping[str, Mapping[str, Any]]
"""The log-probs at one token of a prompt: by id, with `logprob` and `decoded_token`."""


class FrozenServer:
    """Implements `frozen.Frozen` for a model on a server."""

    def __init__(
        self,
        server: TeacherServer,
        policy: Path,
        *,
        retry: RewardRetry,
        away: Away,
        likeliest: Likeliest | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`policy` is the folder with the tokenizer of the policy. Raises BadInput if the API key is not set."""
        key = server.api_key_env
        if key and key not in os.environ:
            raise BadInput(f"{_KEY}.api_key_env: the variable {key} is not set; export it")
        headers = {"authorization": f"Bearer {os.environ[key]}"} if key else {}
        self._http = HttpClient(server.base_url, headers, "the teacher's server", silence_s)
        self._model = server.model or ""
        self._policy = policy
        self._retry = retry
        self._likeliest = likeliest
        self.away = away

    def load(self) -> None:
        """Look up the model on the server, and prove its tokens and log-probs. Raises BadInput."""

        def waiting() -> None:
            if over := self.away.over():
                raise BadInput(over)

        asyncio.run(self._while_waiting([self._probe()], waiting))

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        return {}

    def take(self, weights: Mapping[str, Array]) -> None:
        raise BadInput("a model on a server takes no weights")

    def logprobs(
        self, token_ids: Array, lengths: Array, loss_mask: Array, temperature: float, on_part: Callable[[], None]
    ) -> Array:
        made = np.zeros(len(token_ids), np.float32)
        for start, entries, ids, scored in self._entries(token_ids, lengths, loss_mask, 0, on_part):
            made[start + scored] = [_own(entries[at], ids[at]) for at in scored]
        return made

    def likeliest(
        self,
        token_ids: Array,
        lengths: Array,
        loss_mask: Array,
        temperature: float,
        wanted: Likeliest,
        on_part: Callable[[], None],
    ) -> tuple[Array, Array]:
        rows = [
            _largest(entries[at], wanted)
            for _, entries, _, scored in self._entries(token_ids, lengths, loss_mask, wanted.count, on_part)
            for at in scored
        ]
        shape = (len(rows), wanted.count)
        ids = np.array([ids for ids, _ in rows], np.int32).reshape(shape)
        return ids, np.array([values for _, values in rows], np.float32).reshape(shape)

    def tensors(self) -> list[Tensor]:
        return []

    def _entries(
        self, token_ids: Array, lengths: Array, loss_mask: Array, count: int, on_part: Callable[[], None]
    ) -> list[tuple[int, list[Entry], list[int], Array]]:
        """Return, for each sequence with scored tokens, its first position, the server's entries, its tokens up to the
        last scored one, and the positions of the scored tokens among them."""
        asked: list[tuple[int, list[int], Array]] = []
        starts = np.cumsum(lengths) - lengths
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            scored = np.flatnonzero(loss_mask[start : start + length])
            if len(scored):
                asked.append((start, token_ids[start : start + int(scored[-1]) + 1].tolist(), scored))
        room = asyncio.Semaphore(CONNECTIONS)

        async def one(ids: list[int]) -> list[Entry]:
            async with room:
                return await self._prompt(ids, count)

        answers = asyncio.run(self._while_waiting([one(ids) for _, ids, _ in asked], on_part))
        return [(start, entries, ids, scored) for (start, ids, scored), entries in zip(asked, answers, strict=True)]

    async def _while_waiting(self, work: Sequence[Coroutine[Any, Any, Any]], waiting: Callable[[], None]) -> list[Any]:
        """Return the results of `work`, and call `waiting` regularly, which may raise to give up."""
        tasks = [asyncio.ensure_future(each) for each in work]
        pending: set[asyncio.Future[Any]] = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                waiting()
                for task in done:
                    task.result()
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return the server's answer, however long it is away. Raises BadInput for any other refusal, and
        RpcError(bad_data) for an answer that is no JSON. Whether it is an answer to the question, the caller checks."""
        delay_s = self._retry.backoff_s
        while True:
            try:
                answer = await ask()
            except RpcError as refusal:
                error = refusal
            else:
                return answer
            status = error.status if isinstance(error, HttpRefused) else 0
            if error.code == ErrorCode.INTERNAL:
                raise RpcError(ErrorCode.BAD_DATA, str(error))
            if status and status != _TOO_MANY and status < _SERVER_ERROR:
                raise BadInput(f"{error}{self._remedy(str(error))}")
            self.away.refused(str(error))
            await asyncio.sleep(max(delay_s, min(error.retry_after_s, self._retry.limit_s)))
            delay_s = min(2 * delay_s, max(self._retry.max_backoff_s, self._retry.backoff_s))

    def _remedy(self, error: str) -> str:
        if self._likeliest is None or "logprobs" not in error:
            return ""
        count = self._likeliest.count
        return f"; start vLLM with --max-logprobs {count}, or lower algorithm.distill.top_k"

    async def _prompt(self, ids: list[int], count: int) -> list[Entry]:
        """Return the entries of a prompt's tokens, each with its own log-prob and the `count` largest; the first token
        has none.

        Raises RpcError(bad_data) if they are not those of the prompt. Such a server counts as away, because each of its
        answers may be wrong.
        """
        try:
            entries = await self._of_prompt(ids, count)
        except RpcError as refusal:
            error = refusal
        else:
            self.away.answered()
            return entries
        if error.code == ErrorCode.BAD_DATA:
            self.away.refused(str(error))
            await asyncio.sleep(self._retry.backoff_s)
        raise error

    async def _of_prompt(self, ids: list[int], count: int) -> list[Entry]:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count}
        answer = await self._answer(lambda: self._http.post("/v1/completions", body))
        try:
            (choice,) = answer["choices"]
            entries = choice["prompt_logprobs"]
            if entries is None or len(entries) != len(ids):
                given = "none" if entries is None else str(len(entries))
                raise _not_those(f"{given} log-probs for a prompt of {len(ids)} tokens")
            for entry, token in zip(entries[1:], ids[1:], strict=True):
                _check(entry, token, count)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            return [entry or {} for entry in entries]
        raise _not_those(f"another form than vLLM's prompt_logprobs ({problem})")

    async def _probe(self) -> None:
        models = await self._answer(lambda: self._http.get("/v1/models"))
        served = {str(model["id"]): model for model in models["data"]}
        if not self._model and len(served) == 1:
            self._model = next(iter(served))
        if self._model not in served:
            name = self._model or "(none chosen)"
            raise BadInput(f"{_KEY}.model: {name} is not on the server; use one of {', '.join(served)}")
        tokenizer = load_tokenizer(self._policy)
        special = special_tokens(tokenizer)
        known = [number for number in sorted(tokenizer.get_vocab().values()) if number not in special]
        chosen = known[:: max(1, len(known) // _PROVED_TOKENS)]
        longest = int(served[self._model].get("max_model_len") or _PROMPT_TOKENS)
        size = max(2, min(_PROMPT_TOKENS, longest - 1))
        count = self._likeliest.count if self._likeliest is not None else 0
        differ: list[str] = []
        for first in range(0, len(chosen), size - 1):
            ids = [chosen[0], *chosen[first : first + size - 1]]
            try:
                entries = await self._prompt(ids, count)
            except RpcError as error:
                problem = error
            else:
                texts = [(token, tokenizer.decode([token]), entry) for token, entry in zip(ids, entries, strict=True)]
                differ += [
                    f"token {token} is {own!r} in the policy's tokenizer and {entry[str(token)]['decoded_token']!r} in "
                    "the teacher's"
                    for token, own, entry in texts[1:]
                    if "\N{REPLACEMENT CHARACTER}" not in own
                    and str(entry[str(token)].get("decoded_token", own)) not in (own, own.strip())
                ]
                continue
            raise BadInput(f"{_KEY}: {problem}")
        if differ:
            raise BadInput(f"{_KEY}: {'; '.join(differ[:_SHOWN_TOKENS])}; serve a model with the policy's vocabulary")


def _not_those(what: str) -> RpcError:
    return RpcError(ErrorCode.BAD_DATA, f"the teacher's server returned {what}")


def _check(entry: Entry, token: int, count: int) -> None:
    """Raise RpcError(bad_data) unless `entry` holds log-probs, that of `token` among them."""
    if str(token) not in entry or len(entry) < count:
        raise _not_those(f"{len(entry)} log-probs of {count} likeliest tokens, with that of token {token} or without")
    values = [float(each["logprob"]) for each in entry.values()]
    total = sum(math.exp(value) for value in values if value <= _ABOVE_ONE)
    if any(math.isnan(value) or value > _ABOVE_ONE for value in values) or total > 1.0 + _ABOVE_ONE:
        raise _not_those(
            f"numbers that are no log-probs (the largest is {max(values):.4g}, and the probabilities sum to "
            f"{total:.4g}); start vLLM without --logprobs-mode, or with raw_logprobs"
        )


def _own(entry: Entry, token: int) -> float:
    return min(float(entry[str(token)]["logprob"]), 0.0)


def _largest(entry: Entry, wanted: Likeliest) -> tuple[list[int], list[float]]:
    """Return the ids and log-probs of the likeliest tokens that the policy can read, the likeliest first."""
    found = sorted(
        ((min(float(each["logprob"]), 0.0), -int(token)) for token, each in entry.items() if int(token) < wanted.among),
        reverse=True,
    )[: wanted.count]
    ids = [-token for _, token in found]
    unused = (token for token in range(wanted.among) if token not in ids)
    ids += [token for token, _ in zip(unused, range(wanted.count - len(found)), strict=False)]
    return ids, [value for value, _ in found] + [_UNLIKELY] * (wanted.count - len(found))
