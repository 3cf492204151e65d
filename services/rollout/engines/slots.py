"""Decodes the calls to the embedded engine in one table of rows.

When a sample ends, its row is given to a waiting sample, so no sample waits for the longest one. Rows are dropped and
added in batches, because each change copies the keys and values of all rows. A `steady` table instead keeps the rows of
one call until all of them have ended, so a repeated call gives bit-identical results. A prompt is run once for all its
samples.

Random numbers belong to a prompt: they are derived from the run's seed and the prompt's name, never from a global
generator. A task's samples do not depend on what else is in the table, unless the shape of the table changes the
logits.

Shapes: R rows in the table, N rows from a given row to the end, T tokens at most per sample, S random numbers drawn in
advance, P prompts of L tokens, V tokens in the vocabulary, K tokens that end a sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from services.rollout.engine import FinishReason, Generation, Prompt
from services.rollout.engines.compute import EngineCall
from services.rollout.engines.passes import BlockPasses, Part, gathered, make_passes
from shared.model.routing import routers_of

MAX_ROWS = 1024
"""Maximum number of rows that are decoded at once. Each row needs memory for keys and values."""
_NO_TOKEN = -1
_DRAWN_STEPS = 32  # number of steps for which random numbers are drawn at once
_SEED_MASK = (1 << 63) - 1
_REFILL = 4
"""Rows are added or dropped when at least 1 / `_REFILL` of the table would change."""
_PATIENCE = 8
"""Number of steps after which waiting rows are added in any case."""
Stopped = Callable[[list[int]], bool]
"""Function that returns whether the tail of the given token ids contains a stop text."""


@dataclass(eq=False)
class _OpenCall:
    """A call with its results so far."""

    call: EngineCall
    stopped: Stopped | None
    ends: Sequence[int]
    """The tokens that end a sample."""
    results: list[list[Generation]]
    left: int


@dataclass(eq=False)
class _Group:
    """The samples of one prompt."""

    held: _OpenCall
    number: int
    prompt: Prompt
    generator: torch.Generator
    routes: np.ndarray | None = None
    """The experts of the prompt's tokens, uint8 [L, W], if they are recorded."""

    @property
    def samples(self) -> int:
        return self.held.call.sampling.samples

    @property
    def limit(self) -> int:
        """Maximum number of tokens in each sample."""
        return self.held.call.sampling.max_new_tokens - len(self.prompt.resumed_ids)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt.token_ids, *self.prompt.resumed_ids]


_NOTHING = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), FinishReason.UNFINISHED, np.zeros(0, np.int32))


@dataclass
class _Rows:
    """The state of each row of the table. The last fields hold each row's tokens so far, with W bytes of routes."""

    last_R: Tensor
    """The row's last token."""
    count_R: Tensor
    limit_R: Tensor
    temperature_R1: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    ends_RK: Tensor
    """The tokens that end the row, followed by `_NO_TOKEN`."""
    uniform_RS: Tensor
    running_R: Tensor
    """False if the row has ended and is waiting to be dropped."""
    ids_RT: Tensor
    logprobs_RT: Tensor
    swaps_RT: Tensor
    routes_RTW: Tensor

    @classmethod
    def of(cls, groups: list[_Group], device: torch.device, width: int) -> _Rows:
        """Return new rows, one per sample."""
        samples = torch.tensor([group.samples for group in groups], dtype=torch.int64)
        limits = torch.tensor([group.limit for group in groups], dtype=torch.int64)
        chosen = [group.held.call.sampling for group in groups]
        heat = torch.tensor([sampling.temperature for sampling in chosen], dtype=torch.float32)
        # A greedy row has no other choice than the likeliest token.
        top_k = [sampling.top_k if sampling.truncates else 0 for sampling in chosen]
        top_p = [sampling.top_p if sampling.truncates else 1.0 for sampling in chosen]
        widest = max((len(group.held.ends) for group in groups), default=0)
        ends = [[*group.held.ends, *[_NO_TOKEN] * (widest - len(group.held.ends))] for group in groups]
        rows, longest = int(samples.sum()), int(limits.max()) if groups else 0
        made = cls(
            last_R=torch.zeros(rows, dtype=torch.int64),
            count_R=torch.zeros(rows, dtype=torch.int64),
            limit_R=limits.repeat_interleave(samples),
            temperature_R1=heat.repeat_interleave(samples)[:, None],
            top_k_R=torch.tensor(top_k, dtype=torch.int64).repeat_interleave(samples),
            top_p_R=torch.tensor(top_p, dtype=torch.float32).repeat_interleave(samples),
            ends_RK=torch.tensor(ends, dtype=torch.int64).view(len(groups), widest).repeat_interleave(samples, 0),
            uniform_RS=torch.zeros(rows, _DRAWN_STEPS),
            running_R=torch.ones(rows, dtype=torch.bool),
            ids_RT=torch.zeros((rows, longest), dtype=torch.int32),
            logprobs_RT=torch.zeros(rows, longest),
            swaps_RT=torch.zeros((rows, longest), dtype=torch.int32),
            routes_RTW=torch.zeros((rows, longest, width), dtype=torch.uint8),
        )
        return cls(**{field.name: getattr(made, field.name).to(device) for field in fields(cls)})

    def __len__(self) -> int:
        return len(self.last_R)

    def taken(self, rows: Tensor) -> _Rows:
        """Return only these rows."""
        return _Rows(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def followed_by(self, others: _Rows) -> _Rows:
        joined = {}
        for field in fields(self):
            pair = [getattr(self, field.name), getattr(others, field.name)]
            if field.name.endswith(("_RT", "_RK", "_RTW")):
                widest, filling = max(one.shape[1] for one in pair), _NO_TOKEN if field.name.endswith("K") else 0
                rest = (0, 0) * (pair[0].ndim - 2)
                pair = [nn.functional.pad(one, (*rest, 0, widest - one.shape[1]), value=filling) for one in pair]
            joined[field.name] = torch.cat(pair)
        return _Rows(**joined)


class SlotTable:
    """A `compute.Stepper` that decodes all calls in one table."""

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_ids: Sequence[int],
        stopped: Callable[[tuple[str, ...]], Stopped | None],
        swaps: Callable[[], int],
        slots: int = MAX_ROWS,
        steady: bool = False,
    ) -> None:
        """`slots` is the number of rows that are decoded at once; a group with more samples has the table to itself.
        `stopped` returns a stop-text finder; `swaps` returns the number of times that the engine's weights have been
        set.

        A `steady` table works on one call at a time and pads it to `block_rows` rows. It does not drop rows that have
        ended. Answers of up to 128 tokens with widely varying lengths therefore take 2.5 times as long (2,900 tokens/s
        instead of 7,300, with tiny-qwen3 on one thread), and the quickstart's answers take 1.2 times as long.
        """
        self._model = model
        self._stopped = stopped
        self._swaps = swaps
        self._slots = slots
        self._device = next(model.parameters()).device
        self._eos_ids = tuple(eos_ids)
        self._held: dict[EngineCall, _OpenCall] = {}
        self._waiting: deque[_Group] = deque()
        self._waited = 0
        """Number of steps for which a group that could be added has been waiting."""
        self._passes: BlockPasses | None = None
        """The rows' keys and values, or None if there is no call."""
        self._steady = steady
        self._joins = not steady and make_passes(model, 1).gathers
        """Whether new rows may join rows that are in progress."""
        routers = routers_of(model)
        self._width = 0 if routers is None else routers.width
        self._rows = _Rows.of([], self._device, self._width)
        self._whose: list[tuple[_Group, int]] = []
        """The group of each row, and the row's number in the group."""
        self.tokens = 0
        """Total number of tokens in samples that have ended."""

    # ---- calls

    @property
    def is_empty(self) -> bool:
        """Whether there is no call."""
        return not self._held

    def add(self, call: EngineCall) -> bool:
        if self._steady and self._held:
            return False
        sampling = call.sampling
        results = [[_NOTHING] * sampling.samples for _ in call.prompts]
        left = sampling.samples * len(call.prompts)
        ends = (*self._eos_ids * sampling.ends, *sampling.stop_ids)
        held = self._held[call] = _OpenCall(call, self._stopped(sampling.stop), ends, results, left)
        self._waiting += [
            _Group(held, number, prompt, generator_of(sampling.seed, prompt.name))
            for number, prompt in enumerate(call.prompts)
        ]
        return True

    @torch.inference_mode()
    def drop(self, call: EngineCall) -> None:
        held = self._held.pop(call)
        self._waiting = deque(group for group in self._waiting if group.held is not held)
        mine = [row for row, (group, _) in enumerate(self._whose) if group.held is held]
        self._rows.running_R[mine] = False
        if not self._held:
            self._empty()

    def so_far(self, call: EngineCall) -> list[list[Generation]]:
        held = self._held[call]
        groups = [list(group) for group in held.results]
        running = self._rows.running_R.tolist()
        mine = [row for row, (group, _) in enumerate(self._whose) if group.held is held and running[row]]
        for row, generation in zip(mine, self._generations(mine, [FinishReason.UNFINISHED] * len(mine)), strict=True):
            group, sample = self._whose[row]
            groups[group.number][sample] = generation
        return groups

    # ---- steps

    @torch.inference_mode()
    def step(self) -> None:
        """Run one pass: over the waiting prompts if adding them is worthwhile, otherwise over all rows."""
        running = int(self._rows.running_R.sum())
        coming = self._groups_to_add(running)
        if coming:
            self._add_groups(coming)
            return
        if not self._steady and _REFILL * running <= (_REFILL - 1) * len(self._rows):
            self._drop_ended()
        if self._passes is not None:
            logits_RV, rows = self._passes.go_on(self._rows.last_R), self._rows
            if self._passes.routes is not None:  # those of each row's last token
                at_R = (rows.count_R - 1).clamp(min=0)
                rows.routes_RTW[torch.arange(len(rows), device=self._device), at_R] = self._passes.routes
            self._append_token(logits_RV, first=0)

    def _groups_to_add(self, running: int) -> list[_Group]:
        """Return the groups to add now."""
        if not self._waiting or (running and not self._joins):
            return []
        self._waited += 1
        coming: list[_Group] = []
        free = self._slots - running
        for group in self._waiting:
            if group.samples > free and (running or coming):
                break
            if not self._joins and coming and group.samples != coming[0].samples:
                break  # all prompts must be repeated the same number of times
            coming.append(group)
            free -= group.samples
        rows = sum(group.samples for group in coming)
        return coming if _REFILL * rows >= min(running, self._slots) or self._waited > _PATIENCE else []

    def _add_groups(self, coming: list[_Group]) -> None:
        """Run the prompts, sample the first token of each sample, and add the samples to the rows."""
        self._waited = 0
        for _ in coming:
            self._waiting.popleft()
        real = len(coming)
        coming = [*coming, *self._padding(coming)]
        lengths = [len(group.token_ids) for group in coming]
        longest, room = max(lengths), max(group.limit for group in coming)
        ids_PL = torch.zeros((len(coming), longest), dtype=torch.int64)
        for row, group in enumerate(coming):
            ids_PL[row, longest - lengths[row] :] = torch.tensor(group.token_ids)
        prompts = make_passes(self._model, longest + room)
        logits_PV = prompts.begin(ids_PL.to(self._device), lengths)
        if prompts.routes is not None:
            routes_PLW = prompts.routes.cpu().numpy()
            for row, group in enumerate(coming):
                group.routes = routes_PLW[row, longest - lengths[row] :]
        new = _Rows.of(coming, self._device, self._width)
        new.running_R[sum(group.samples for group in coming[:real]) :] = False
        samples = torch.tensor([group.samples for group in coming])
        prompt_N = torch.arange(len(coming)).repeat_interleave(samples).to(self._device)
        kept = self._rows.running_R.nonzero().squeeze(1)
        parts: list[Part] = [(prompts, prompt_N)]
        if self._passes is not None and len(kept):
            parts.insert(0, (self._passes, kept))
            room = max(room, int((self._rows.limit_R - self._rows.count_R)[kept].max()))
        self._passes = gathered(self._model, parts, room)
        self._whose = [self._whose[row] for row in kept.tolist()]
        self._whose += [(group, sample) for group in coming for sample in range(group.samples)]
        self._rows = self._rows.taken(kept).followed_by(new)
        self._append_token(logits_PV, first=len(kept), prompt_N=prompt_N)

    def _padding(self, coming: list[_Group]) -> list[_Group]:
        """Return the groups that fill a steady table, up to `block_rows` rows. Their samples are discarded."""
        first = coming[0]
        rows = first.held.call.sampling.block_rows if self._steady else 0
        return [first] * (min(-(-rows // first.samples), max(self._slots // first.samples, 1)) - len(coming))

    def _drop_ended(self) -> None:
        kept = self._rows.running_R.nonzero().squeeze(1)
        if not len(kept) or self._passes is None:
            self._empty()
            return
        self._passes.keep(kept)
        self._whose = [self._whose[row] for row in kept.tolist()]
        self._rows = self._rows.taken(kept)

    def _empty(self) -> None:
        self._passes, self._whose, self._rows = None, [], _Rows.of([], self._device, self._width)

    def _append_token(self, logits_PV: Tensor, first: int, prompt_N: Tensor | None = None) -> None:
        """Append one token to each row, beginning with row `first`. The logits are `logits_PV[prompt_N]` or just
        `logits_PV`."""
        mine, rows = slice(first, None), self._rows
        self._draw(first)
        heat_N1, count_N, running_N = rows.temperature_R1[mine], rows.count_R[mine], rows.running_R[mine]
        # A row of each prompt, whose settings are those of all its rows.
        row_N = row_P = torch.arange(len(heat_N1), device=self._device)
        if prompt_N is not None:
            row_N, row_P = prompt_N, row_P.new_zeros(len(logits_PV)).index_copy_(0, prompt_N, row_P)
        heat_P1 = heat_N1[row_P]
        logprobs_PV = (logits_PV.float() / heat_P1.masked_fill(heat_P1 == 0, 1.0)).log_softmax(-1)
        if any(held.call.sampling.truncates for held in self._held.values()):
            logprobs_PV = truncated(logprobs_PV, rows.top_k_R[mine][row_P], rows.top_p_R[mine][row_P])
        heats = {held.call.sampling.temperature for held in self._held.values()}
        id_N1 = logprobs_PV.argmax(-1, keepdim=True)[row_N] if 0.0 in heats else torch.empty(0)
        if any(heats):
            uniform_N1 = rows.uniform_RS[mine].gather(1, (count_N % _DRAWN_STEPS)[:, None])
            sampled_N1 = pick(logprobs_PV, uniform_N1, prompt_N)
            id_N1 = torch.where(heat_N1 == 0, id_N1, sampled_N1) if 0.0 in heats else sampled_N1
        id_N = id_N1[:, 0]
        # A row that has ended overwrites its last token, which was read when it ended.
        at_N1 = count_N.clamp(max=rows.ids_RT.shape[1] - 1)[:, None]
        rows.ids_RT[mine].scatter_(1, at_N1, id_N[:, None].to(torch.int32))
        rows.logprobs_RT[mine].scatter_(1, at_N1, logprobs_PV[row_N, id_N][:, None])
        rows.swaps_RT[mine].scatter_(1, at_N1, self._swaps())
        rows.last_R[mine] = id_N
        count_N += running_N
        stopped_N = (rows.ends_RK[mine] == id_N1).any(-1)
        if any(held.stopped is not None for held in self._held.values()):
            stopped_N |= self._stopped_by_text(first)
        ended_N = (stopped_N | (count_N >= rows.limit_R[mine])) & running_N
        if bool(ended_N.any()):
            running_N &= ~ended_N
            places = ended_N.nonzero().squeeze(1)
            self._end((places + first).tolist(), stopped_N[places].tolist())

    def _draw(self, first: int) -> None:
        """From row `first` on, draw random numbers for the rows that have none left for their next token."""
        due_N = (self._rows.count_R[first:] % _DRAWN_STEPS == 0) & self._rows.running_R[first:]
        rows_of: dict[_Group, list[tuple[int, int]]] = {}
        for place in due_N.nonzero().squeeze(1).tolist():
            group, sample = self._whose[first + place]
            if group.held.call.sampling.temperature:
                rows_of.setdefault(group, []).append((first + place, sample))
        for group, places in rows_of.items():
            drawn_SN = torch.rand((_DRAWN_STEPS, group.samples), generator=group.generator)
            rows, samples = zip(*places, strict=True)
            self._rows.uniform_RS[list(rows)] = drawn_SN.T[list(samples)].to(self._device)

    def _stopped_by_text(self, first: int) -> Tensor:
        found_N = torch.zeros(len(self._rows) - first, dtype=torch.bool)
        counts = self._rows.count_R.tolist()
        for row in (self._rows.running_R[first:].nonzero().squeeze(1) + first).tolist():
            group, _ = self._whose[row]
            if group.held.stopped is not None:
                sampled = self._rows.ids_RT[row, : counts[row]].tolist()
                found_N[row - first] = group.held.stopped([*group.prompt.resumed_ids, *sampled])
        return found_N.to(self._device)

    def _end(self, rows: list[int], stopped: list[bool]) -> None:
        reasons = [FinishReason.STOP if is_stop else FinishReason.LENGTH for is_stop in stopped]
        for row, generation in zip(rows, self._generations(rows, reasons), strict=True):
            group, sample = self._whose[row]
            group.held.results[group.number][sample] = generation
            group.held.left -= 1
            self.tokens += len(generation.token_ids)
            if not group.held.left:
                del self._held[group.held.call]
                group.held.call.answer.set_result(group.held.results)
        if not self._held:
            self._empty()

    def _generations(self, rows: list[int], reasons: list[FinishReason]) -> list[Generation]:
        """Return the generations so far for these rows. `reasons` are their finish reasons."""
        ids, logprobs, swaps = (
            column[rows].cpu().numpy() for column in (self._rows.ids_RT, self._rows.logprobs_RT, self._rows.swaps_RT)
        )
        counts = self._rows.count_R[rows].tolist()
        routes = self._routes(rows, counts) if self._width else [None] * len(rows)
        return [
            Generation(
                token_ids=ids[place, :count].copy(),
                logprobs=logprobs[place, :count].copy(),
                finish_reason=reason,
                swaps=swaps[place, :count].copy(),
                routes=routes[place],
            )
            for place, (count, reason) in enumerate(zip(counts, reasons, strict=True))
        ]

    def _routes(self, rows: list[int], counts: list[int]) -> list[np.ndarray | None]:
        """Return the routes of the prompts and completions of these rows."""
        sampled = self._rows.routes_RTW[rows].cpu().numpy()
        made: list[np.ndarray | None] = []
        for row, part, count in zip(rows, sampled, counts, strict=True):
            prompt = self._whose[row][0].routes
            part[max(count - 1, 0) :] = 0
            made.append(None if prompt is None else np.concatenate((prompt, part[:count])))
        return made


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random number generator for a prompt."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) & _SEED_MASK)


def truncated(logprobs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return the log-probs of the distributions that are left: of the `top_k_R` likeliest tokens (0: all), the smallest
    set of likeliest ones whose probability reaches `top_p_R` (nucleus sampling, arXiv 1904.09751). Other tokens have
    probability 0. Ties go to the lower token."""
    sorted_RV, order_RV = logprobs_RV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(logprobs_RV.shape[1], device=logprobs_RV.device)
    all_R = (top_k_R <= 0) & (top_p_R >= 1)
    sorted_RV = sorted_RV.masked_fill((rank_V >= top_k_R[:, None]) & (top_k_R > 0)[:, None], -torch.inf)
    probs_RV = sorted_RV.softmax(-1)
    before_RV = probs_RV.cumsum(-1, dtype=torch.float64) - probs_RV
    beyond_RV = (before_RV >= top_p_R[:, None]) & (top_p_R < 1)[:, None] & (rank_V > 0)
    sorted_RV = sorted_RV.masked_fill(beyond_RV, -torch.inf).log_softmax(-1)
    left_RV = torch.empty_like(logprobs_RV).scatter_(-1, order_RV, sorted_RV)
    return torch.where(all_R[:, None], logprobs_RV, left_RV)


def pick(logprobs_RV: Tensor, uniform_NM: Tensor, row_N: Tensor | None = None) -> Tensor:
    """Return sampled tokens, int64 [N, M], by inverting the cumulative distributions at `uniform_NM`.

    `row_N` lists the rows of `logprobs_RV` to sample from; by default, each row is used once. Inversion picks the first
    token whose cumulative probability exceeds u times the total. The probability of that token is never 0: a CPU adds
    up in order. A GPU adds up blocks, whose rounding in float32 could raise the sum at a token of probability 0.
    """
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float32 if logprobs_RV.is_cpu else torch.float64)
    cumulative_NV = cumulative_RV if row_N is None else cumulative_RV[row_N]
    point_NM = uniform_NM.to(logprobs_RV.device) * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, point_NM, right=True).clamp_(max=logprobs_RV.shape[1] - 1)
