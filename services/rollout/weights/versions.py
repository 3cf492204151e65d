"""Maps sampled tokens to the policy version of the weights that sampled them.

Versions are never guessed: unproved weights have no version, and neither do their tokens.
"""

from __future__ import annotations

import numpy as np

from proto.tensors import Array


class BlockVersions:
    """The versions with which one lease is sampled. Versions are added on the service's loop and read on any thread.

    Engines count how often their weights have been replaced since they started (`Engine.swaps`) and report the count
    for each token, so it does not matter when a block of the lease began, as long as this object existed by then.
    """

    def __init__(self, step: int, swaps: int) -> None:
        """Start with the proved version `step`, which the engine holds after `swaps` swaps."""
        self.began = swaps
        self._steps = {swaps: step}

    @property
    def first(self) -> int:
        """The version that the engine held when sampling for the lease began."""
        return self._steps[self.began]

    def replaced(self, step: int, swaps: int) -> None:
        """Record that the engine holds the proved version `step` after `swaps` swaps."""
        self._steps[swaps] = step

    def of(self, swaps: Array) -> Array:
        """Return the version of each token, int32 [N], given int32 `swaps` [N].

        Raises ValueError for a token that was sampled with earlier weights or with weights that have not been proved.
        """
        known = np.fromiter(self._steps, np.int32)
        at = np.minimum(known.searchsorted(swaps), len(known) - 1)
        if (known[at] != swaps).any():
            raise ValueError(
                f"tokens were sampled after {int(swaps.min())} to {int(swaps.max())} swaps of the engine's weights, "
                f"but the versions are known only for swap counts {', '.join(map(str, self._steps))}"
            )
        found: Array = np.fromiter(self._steps.values(), np.int32)[at]
        return found
