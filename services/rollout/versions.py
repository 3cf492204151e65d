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
        self._steps = [step]

    @property
    def first(self) -> int:
        """The version that the engine held when the lease began to be sampled."""
        return self._steps[0]

    def replaced(self, step: int) -> None:
        """The next swap brought version `step`, and it is proved."""
        self._steps.append(step)

    def of(self, swaps: Array) -> Array:
        """int32 [N]: the version of each token, of int32 `swaps` [N].

        Raises ValueError for a token of weights that were set before, or are not proved.
        """
        at = swaps - self.began
        steps = np.array(self._steps, np.int32)
        if len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(steps):
            raise ValueError(
                f"tokens sampled after {int(swaps.min())} to {int(swaps.max())} swaps of the engine's weights, its "
                f"versions are known after {self.began} to {self.began + len(steps) - 1}"
            )
        found: Array = steps[at]
        return found
