"""The sections of the experiment trackers to which a run reports. A topology never contains their keys or tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.topology.fields import Count, LocalPath, Section

SampleCount = Annotated[
    int,
    Field(
        ge=0,
        description="number of samples that a table has of a step and of each of its evaluations; 0: no tables",
    ),
]
SampleInterval = Annotated[
    Count,
    Field(description="steps from one table of training samples to the next; evaluated steps always have a table"),
]
Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]


class Wandb(Section):
    project: str = Field(min_length=1, description="Weights & Biases project")
    entity: str | None = Field(default=None, description="Weights & Biases team or user; default: that of the API key")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: only write files, which `wandb sync` uploads later"
    )
    samples: SampleCount = 8
    samples_every: SampleInterval = 10


class Tensorboard(Section):
    directory: LocalPath | None = Field(
        default=None,
        description="folder in which this run creates a folder for its event files; default: the run directory",
    )
    samples: SampleCount = 8
    samples_every: SampleInterval = 10


class Mlflow(Section):
    uri: str = Field(
        pattern=r"^(https?://[^\s]+|sqlite:///.+)$",
        description="tracking server http://HOST:PORT, or sqlite:///FILE, which `mlflow ui` reads",
    )
    experiment: str = Field(default="rlbus", min_length=1, description="name of the MLflow experiment")
    samples: SampleCount = 8
    samples_every: SampleInterval = 10


class Trackio(Section):
    project: str = Field(min_length=1, description="trackio project")
    url: Url | None = Field(
        default=None, description="trackio server of your own; default: the database that `trackio show` reads"
    )
    samples: SampleCount = 8
    samples_every: SampleInterval = 10


Tracker = Wandb | Tensorboard | Mlflow | Trackio
