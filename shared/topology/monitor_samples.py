"""The section `monitor.samples`: which samples are written to `samples/` in the run directory."""

from __future__ import annotations

from pydantic import Field

from shared.topology.fields import Count, Section, Size


class Samples(Section):
    every: Count = Field(
        default=1, description="record the samples of steps that are multiples of this number; must be 1 or more"
    )
    per_step: Count = Field(
        default=4,
        description="average number of tasks per step whose samples are recorded; evaluations record all of their "
        "tasks",
    )
    limit_bytes: Size = Field(
        default=1024**3, description="maximum bytes of samples/, such as 1GiB; the oldest samples are removed first"
    )
