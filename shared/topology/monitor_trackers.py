"""The sections of the experiment trackers to which a run reports. A topology never contains their keys or tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.topology.fields import LocalPath, Section

SampleCount = Annotated[
    int,
    Field(
        ge=0,
        description="number of samples from each evaluated step, and from each of its evaluations, that are sent as a "
        "table; 0: none",
    ),
]
Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]


class Wandb(Section):
    project: str = Field(min_length=1, description="Weights & Biases project")
    entity: str | None = Field(default=None, description="Weights & Biases team or user; default: that of the API key")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: only write files, which `wandb sync` uploads later"
    )
    samples: SampleCount = 8


class Tensorboard(Section):
    directory: LocalPath | None = Field(
        default=None,
        description="folder in which this run creates a folder for its event files; default: the run directory",
    )
    samples: SampleCount = 8


class Mlflow(Section):
    uri: str = Field(
        pattern=r"^(https?://[^\s]+|sqlite:///.+)$",
        description="tracking server http://HOST:PORT, or sqlite:///FILE, which `mlflow ui` reads",
    )
    experiment: str = Field(default="rlbus", min_length=1, description="name of the MLflow experiment")


class Trackio(Section):
    project: str = Field(min_length=1, description="trackio project")
    url: Url | None = Field(
        default=None, description="trackio server of your own; default: the database that `trackio show` reads"
    )
    samples: SampleCount = 8


Tracker = Wandb | Tensorboard | Mlflow | Trackio
