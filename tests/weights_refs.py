"""References to versions of the weights, for tests of what handles such references."""

from __future__ import annotations

from proto.messages import Canary, WeightsRef


def weights_ref(
    lineage: int,
    step: int,
    canary: Canary,
    drill: Canary | None = None,
    *,
    drill_seed: int = 0,
    nbytes: int = 1,
    store: str = "batch-store/0",
) -> WeightsRef:
    """Return a reference to the version (`lineage`, `step`). The drill's canary is `canary` if there is no `drill`."""
    return WeightsRef(
        lineage=lineage,
        step=step,
        task_id=f"weights/{lineage}/{step}",
        fence=1,
        store=store,
        nbytes=nbytes,
        canary=canary,
        drill=drill or canary,
        drill_seed=drill_seed,
    )
