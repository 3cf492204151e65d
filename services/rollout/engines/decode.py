"""Samples one block of prompts from a causal language model.

Rows stay until the block ends, so the same block gives the same bits. A prompt is run once, and its keys and values are
repeated for its samples. Random numbers belong to a prompt: they follow from the run's seed and the prompt's name,
never from a global generator. A task therefore samples the same in any block, unless the shape of the block changes the
logits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import nn

from services.rollout.engine import Generation, GenerationCancelled, Prompt, SamplingParams
from services.rollout.engines.notes import Notes
from services.rollout.engines.passes import make_passes

MAX_ROWS = 1024
"""Maximum number of rows that are decoded at once, because rows cost key/value memory."""
DRAWN_STEPS = 32  # number of steps for which random numbers are drawn at once
_SEED_MASK = (1 << 63) - 1


Stopped = Callable[[list[int]], bool]
"""Returns whether a stop text is in the tail of these token ids."""


@dataclass(frozen=True)
class Ending:
    """The conditions that end a completion: `eos_ids`, and `stopped`, which finds stop texts in a tail of token ids."""

    eos_ids: tuple[int, ...]
    stopped: Stopped | None = None


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random number generator of a prompt."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) & _SEED_MASK)


class Draws:
    """Uniform numbers in [0, 1) for a block. Each prompt has its own generator, so neighbours change nothing."""

    def __init__(self, names: Sequence[str], seed: int, samples: int) -> None:
        self._samples = samples
        self._generators = [generator_of(seed, name) for name in names]
        self._drawn = torch.empty(0)

    def at(self, step: int) -> torch.Tensor:
        """Return float32 [prompts, samples] of `step`. Steps must be requested in order."""
        if step % DRAWN_STEPS == 0:
            self._drawn = torch.stack(
                [torch.rand((DRAWN_STEPS, self._samples), generator=each) for each in self._generators], dim=1
            )
        return self._drawn[step % DRAWN_STEPS]


def pick(logprobs_RV: torch.Tensor, uniform_RN: torch.Tensor | None) -> torch.Tensor:
    """Return int64 [R, N]: the likeliest tokens, or sampled ones, by inversion of the cumulative distribution at
    `uniform_RN`.

    Inversion picks the first token whose cumulative probability exceeds u times the total. Its probability is never 0.
    """
    if uniform_RN is None:
        return logprobs_RV.argmax(-1, keepdim=True)
    cumulative_RV = logprobs_RV.exp().cumsum(-1)
    point_RN = uniform_RN.to(logprobs_RV.device) * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, point_RN, right=True).clamp_(max=logprobs_RV.shape[1] - 1)


class Block:
    """The decode loop of one block over R = prompts x samples rows."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        ending: Ending,
        *,
        before_step: Callable[[], None],
        swaps: Callable[[], int],
        notes: Notes | None = None,
    ) -> None:
        """`before_step` is called before every forward pass; what it raises ends the block.

        It may replace the weights, and `swaps` returns how often the engine did so. Keys and values of earlier tokens
        stay those of the weights that computed them.
        """
        self._sampling = sampling
        self._ending = ending
        self._before_step = before_step
        self._swaps = swaps
        self._notes = notes
        self._swaps_T: list[int] = []
        self._real = len(prompts)
        self._prompts = list(prompts) + [prompts[0]] * (-(-sampling.block_rows // sampling.samples) - len(prompts))
        self._device = next(model.parameters()).device
        longest = max(len(prompt.token_ids) + len(prompt.said) for prompt in self._prompts)
        self._passes = make_passes(model, longest + sampling.max_new_tokens)
        n = sampling.samples
        rows, limits = len(self._prompts) * n, [sampling.max_new_tokens - len(each.said) for each in self._prompts]
        self._limit_R = torch.tensor(limits, device=self._device).repeat_interleave(n)
        self._ids_RT = torch.zeros((rows, max(limits)), dtype=torch.int64, device=self._device)
        self._logprobs_RT = torch.zeros((rows, max(limits)), dtype=torch.float32, device=self._device)
        self._length_R = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._stopped_R = torch.zeros(rows, dtype=torch.bool, device=self._device)

    def run(self) -> list[list[Generation]]:
        """Sample all rows. Padding rows are left out of the result."""
        ids_RT, logprobs_RT, length_R, stopped_R = self._ids_RT, self._logprobs_RT, self._length_R, self._stopped_R
        n, rows, steps = self._sampling.samples, len(length_R), ids_RT.shape[1]
        temperature = self._sampling.temperature
        draws = Draws([prompt.name for prompt in self._prompts], self._sampling.seed, n) if temperature else None
        running_R = torch.arange(rows, device=self._device) < self._real * n  # unfinished rows
        eos = torch.tensor(self._ending.eos_ids, device=self._device)
        logits_RV = self._prefill()
        for step in range(steps):
            logprobs_RV = (logits_RV.float() / (temperature or 1.0)).log_softmax(-1)
            uniform = draws.at(step) if draws else None
            if step == 0:  # one row of logits per prompt, for all its samples
                ids = pick(logprobs_RV, uniform).expand(-1, n)
            else:
                ids = pick(logprobs_RV, None if uniform is None else uniform.reshape(-1, 1))
            id_R = ids.reshape(-1)
            ids_RT[:, step] = id_R
            logprobs_RT[:, step] = logprobs_RV.gather(1, ids).reshape(-1)
            length_R += running_R
            ended_R = torch.isin(id_R, eos) & running_R
            if self._ending.stopped is not None:
                said = [prompt.said for prompt in self._prompts for _ in range(n)]
                ended_R |= _ended_by_text(self._ending.stopped, said, ids_RT[:, : step + 1], running_R)
            stopped_R |= ended_R
            running_R = running_R & ~ended_R & (length_R < self._limit_R)
            if step == steps - 1 or not bool(running_R.any()):
                break
            if step == 0:
                self._passes.repeat(n)
            logits_RV = self._decode(id_R)
        return self._results()

    def _prefill(self) -> torch.Tensor:
        prompts = [[*prompt.token_ids, *prompt.said] for prompt in self._prompts]
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids_PL = torch.zeros((len(lengths), longest), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_PL[row, longest - lengths[row] :] = torch.tensor(prompt)
        self._before_pass()
        return self._passes.begin(ids_PL.to(self._device), lengths)

    def _decode(self, id_L: torch.Tensor) -> torch.Tensor:
        self._before_pass()
        return self._passes.go_on(id_L)

    def _before_pass(self) -> None:
        try:
            self._before_step()
        except GenerationCancelled:
            self._note()
            raise
        if self._notes is not None and self._notes.due:
            self._note()
        self._swaps_T.append(self._swaps())

    def _note(self) -> None:
        if self._notes is not None and self._swaps_T:
            self._notes.take(self._results())

    def _results(self) -> list[list[Generation]]:
        """Return the generations so far. `finish_reason` is empty for unfinished rows."""
        ids = self._ids_RT.to(torch.int32).cpu().numpy()
        logprobs = self._logprobs_RT.cpu().numpy()
        lengths, stopped, limits = self._length_R.tolist(), self._stopped_R.tolist(), self._limit_R.tolist()
        swaps_T = np.array(self._swaps_T, np.int32)  # pass t made the logits of token t
        n = self._sampling.samples
        return [
            [
                Generation(
                    token_ids=ids[row, : lengths[row]].copy(),
                    logprobs=logprobs[row, : lengths[row]].copy(),
                    finish_reason="stop" if stopped[row] else "length" if lengths[row] == limits[row] else "",
                    swaps=swaps_T[: lengths[row]].copy(),
                )
                for row in range(first, first + n)
            ]
            for first in range(0, self._real * n, n)
        ]


def _ended_by_text(
    stopped: Stopped, said_L: Sequence[Sequence[int]], ids_LT: torch.Tensor, running_L: torch.Tensor
) -> torch.Tensor:
    ended_L = torch.zeros_like(running_L)
    for row in running_L.nonzero().squeeze(1).tolist():
        ended_L[row] = stopped([*said_L[row], *ids_LT[row].tolist()])
    return ended_L


def check_cancelled(cancel: threading.Event) -> None:
    """Raise GenerationCancelled if `cancel` is set."""
    if cancel.is_set():
        raise GenerationCancelled("the block was given up: its lease ended")
