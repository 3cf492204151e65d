"""The layout of the worker group: which ranks share samples, sequences and layers.

Ranks are numbered with tp varying fastest, then cp, dp, and pp (megatron's order), so that the ranks that communicate
most are neighbours. The driver and the workers compute the layout from the same settings; it is not sent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Degrees of a group of ranks; `dp` is derived, and every `ep` neighbours among its ranks share the experts of a
    copy. Raises ValueError unless tp*pp*cp divides `world_size`, and ep divides dp."""

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.tp, self.pp, self.cp) < 1 or self.world_size % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"{self.world_size} ranks are not a multiple of tp*pp*cp = {self.tp * self.pp * self.cp}; "
                "set services.policy-trainer.workers (on CUDA: gpus) to a multiple"
            )
        if self.ep < 1 or self.dp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide dp {self.dp}; use a divisor, or more ranks")

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, among which the samples of a batch are divided."""
        return self.world_size // (self.tp * self.pp * self.cp)

    def place(self, rank: int) -> RankPlace:
        """Return the position of `rank` along each parallel dimension."""
        tp_rank, rest = rank % self.tp, rank // self.tp
        cp_rank, rest = rest % self.cp, rest // self.cp
        dp_rank, pp_rank = rest % self.dp, rest // self.dp
        return RankPlace(self, rank, dp_rank, tp_rank, pp_rank, cp_rank)


@dataclass(frozen=True)
class RankPlace:
    """One rank of a layout."""

    layout: Layout
    rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int

    @property
    def counts(self) -> bool:
        """Whether the log-probs of this rank count, that is, whether it is the first tp rank of the last pp stage.
        Other ranks hold copies."""
        return self.tp_rank == 0 and self.pp_rank == self.layout.pp - 1

    @property
    def ep_rank(self) -> int:
        """Which of the ranks that share the experts of a copy this is."""
        return self.dp_rank % self.layout.ep

    @property
    def leads(self) -> bool:
        """Whether this rank puts the shards from a forward pass of its data-parallel rank."""
        return self.counts and self.cp_rank == 0
