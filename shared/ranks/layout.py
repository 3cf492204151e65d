"""How the ranks of the worker group are arranged: which of them share samples, sequences, layers. Arithmetic only.

Ranks count with tp fastest, then cp, dp, and pp slowest (megatron's order), so that the ranks that talk most are
neighbours. Driver and workers use the same file: nobody sends a layout.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Degrees of a group of `world_size` ranks; `dp` is derived. Raises ValueError when they do not divide it."""

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.tp, self.pp, self.cp) < 1 or self.world_size % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"{self.world_size} ranks are no multiple of tp*pp*cp = {self.tp * self.pp * self.cp}; "
                "set services.policy-trainer.workers (gpus on CUDA) to one"
            )

    @property
    def dp(self) -> int:
        """Data-parallel ranks: so many ways are the samples of a batch divided."""
        return self.world_size // (self.tp * self.pp * self.cp)

    def place(self, rank: int) -> Place:
        """Where `rank` stands along each degree."""
        tp_rank, rest = rank % self.tp, rank // self.tp
        cp_rank, rest = rest % self.cp, rest // self.cp
        dp_rank, pp_rank = rest % self.dp, rest // self.dp
        return Place(self, rank, dp_rank, tp_rank, pp_rank, cp_rank)


@dataclass(frozen=True)
class Place:
    """One rank of a layout."""

    layout: Layout
    rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int

    @property
    def counts(self) -> bool:
        """Whether this rank holds log-probs that no other rank holds too: first of tp, last stage of pp, any of cp."""
        return self.tp_rank == 0 and self.pp_rank == self.layout.pp - 1

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its data-parallel rank (puts the shards that a forward pass makes)."""
        return self.counts and self.cp_rank == 0
