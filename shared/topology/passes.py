"""Which forward passes compute the log-probs of a model. The fast ones assume something about its architecture, which
`shared.model.proof` proves for a model before a run uses them. It does not import torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import Field

from shared.topology.fields import Section
from shared.topology.lora import AdapterPlan


class Passes(Section):
    """The passes of the trainer, the reference and the embedded engine. The defaults assume nothing about a model."""

    sequences: Literal["packed", "padded", "single"] = Field(
        default="single",
        description="how the sequences of a micro-batch are laid out: without padding, with common prefixes computed "
        "once; padded on the right; or one sequence a pass",
    )
    head: Literal["blocks", "whole"] = Field(
        default="whole",
        description="whether the output layer runs on blocks of the scored positions, or on all positions at once",
    )
    decoder: Literal["written-out", "modules"] = Field(
        default="modules",
        description="whether the embedded engine runs plain decoders in float32 on a CPU with explicit code instead of "
        "the model's modules",
    )

    def __str__(self) -> str:
        return f"sequences {self.sequences}, head {self.head}, decoder {self.decoder}"


FASTEST = Passes(sequences="packed", head="blocks", decoder="written-out")
_SEQUENCES = ("single", "padded", "packed")


class Verdict(msgspec.Struct, frozen=True):
    """The result for one model: the fastest passes that are proved for it."""

    sequences: Literal["packed", "padded", "single"] = "single"
    head: Literal["blocks", "whole"] = "whole"
    decoder: Literal["written-out", "modules"] = "modules"
    refused: str = ""
    """Why no passes compute a policy's log-probs with this model, or an empty string."""
    reasons: list[str] = []
    """Why faster passes are not proved, one line each."""
    model: str = ""
    """The model's class."""
    parameters: int = 0
    layers: int = 0
    """The size of the reduced model, 0 if there is none."""
    cpu_s: float | None = None
    """The processor time that the proof took, or None if the verdict was known."""
    adapter: AdapterPlan | None = None
    """The plan of the model's adapter, or None for a model without one."""
    unwatched: str = ""
    """Why the routers of a mixture of experts cannot be watched (`shared.model.routing`), or an empty string."""

    @property
    def passes(self) -> Passes:
        return Passes(sequences=self.sequences, head=self.head, decoder=self.decoder)


def exceeds(wanted: Passes, proved: Passes) -> list[str]:
    """Return the keys of `wanted` that need a proof which `proved` does not contain."""
    return [
        *(["sequences"] if _SEQUENCES.index(wanted.sequences) > _SEQUENCES.index(proved.sequences) else []),
        *(["head"] if wanted.head == "blocks" != proved.head else []),
        *(["decoder"] if wanted.decoder == "written-out" != proved.decoder else []),
    ]
