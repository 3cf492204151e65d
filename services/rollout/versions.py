"""Which policy version an engine's weights were when a token was sampled. Must never guess: weights that nobody has
proved have no version, and no token of theirs gets one.
"""

from __future__ import annotations

import numpy as np

from proto.tensors import Array


class BlockVersions:
    """The versions under which the samples of one lease are made. Grows on the service's loop, is read on any thread.

    Engines count how often their weights were replaced since they started (`Engine.swaps`) and say so of each token,
    so that it does not matter when, after this began, a block of the lease began.
    """

    def __init__(self, step: int, swaps: int) -> None:
        """Version `step`, proved, after so many `swaps`."""
        self.began = swaps
        self._steps = {swaps: step}

    @property
    def first(self) -> int:
        """The version that the engine held when the lease began to be sampled."""
        return self._steps[self.began]

    def replaced(self, step: int, swaps: int) -> None:
        """The engine holds version `step`, proved, after so many `swaps`."""
        self._steps[swaps] = step

    def of(self, swaps: Array) -> Array:
        """int32 [N]: the version of each token, of int32 `swaps` [N].

        Raises ValueError for a token of weights that were set before, or are not proved.
        """
        known = np.fromiter(self._steps, np.int32)
        at = np.searchsorted(known, swaps).clip(max=len(known) - 1)
        if (known[at] != swaps).any():
            raise ValueError(
                f"tokens sampled after {int(swaps.min())} to {int(swaps.max())} swaps of the engine's weights, its "
                f"versions are known after {', '.join(map(str, self._steps))}"
            )
        found: Array = np.fromiter(self._steps.values(), np.int32)[at]
        return found
