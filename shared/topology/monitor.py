"""The section `monitor`: what observes a run and to whom it is reported, with the checks of its addresses and tokens.

The topology names the files that hold tokens, never the tokens or keys: a run directory shows its topology to everyone
who can read the directory.
"""

from __future__ import annotations

import ipaddress
import stat
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shared.topology.document import Found
from shared.topology.fields import Count, LocalPath, Section, Size, Strings, not_one_of

MIN_TOKEN = 16
"""Minimum number of characters in a token."""
_MAKE = "openssl rand -hex 24 > FILE; chmod 600 FILE"
_MONITOR = ("monitor",)
_SCHEMES = ("http://", "https://")


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 address is written in brackets. Raises ValueError for other text."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address with a port; write one such as 127.0.0.1:8080")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. Host names other than localhost are considered reachable by
    others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(address: str) -> str:
    """Return `address`. Raises ValueError if it is not `host:port` with a port other than 0."""
    _, port = split_address(address)
    if port == 0:
        raise ValueError(f"{address!r} has no valid port; write one from 1 to 65535")
    return address


class TokenError(ValueError):
    """A file does not hold a usable token. The message is one line that names the file, the fault and the remedy."""


def read_token(file: str) -> str:
    """Return the token in `file`. Raises TokenError if it is missing, too short, or readable by others."""
    path = Path(file)
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise TokenError(f"{file}: {why}; write a token into a file: {_MAKE}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenError(f"{file}: others may read it (mode {stat.S_IMODE(mode):04o}); run chmod 600 {file}")
    if len(token) < MIN_TOKEN or not token.isascii() or any(character.isspace() for character in token):
        raise TokenError(f"{file}: {len(token)} characters; it must be one ASCII word of {MIN_TOKEN} or more: {_MAKE}")
    return token


class Web(Section):
    listen: Annotated[str, AfterValidator(check_address)] = Field(
        default="127.0.0.1:8080", description="address and TCP port of the page"
    )
    token: LocalPath | None = Field(
        default=None,
        description="file with the token that visitors need; required unless only this machine can reach the address",
    )
    operator_token: LocalPath | None = Field(
        default=None,
        description="file with another token, needed to restart and drain services from the page; default: the page "
        "has no buttons",
    )


def _check_url(url: str) -> str:
    rest = next((url.removeprefix(scheme) for scheme in _SCHEMES if url.startswith(scheme)), "")
    host = rest.partition("/")[0]
    if not host or "@" in host or any(character.isspace() for character in url):
        raise ValueError(f"{url!r} is not the address of a collector; write one such as http://127.0.0.1:4318")
    return url


class Prometheus(Section):
    listen: Annotated[str, AfterValidator(check_address)] = Field(
        default="127.0.0.1:9464", description="address and TCP port of /metrics"
    )
    token: LocalPath | None = Field(
        default=None,
        description="file with the bearer token that scrapers need; required unless only this machine can reach "
        "the address",
    )


class Traces(Section):
    otlp: Annotated[str, AfterValidator(_check_url)] | None = Field(
        default=None,
        description="address of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318; headers "
        "are taken from OTEL_EXPORTER_OTLP_HEADERS; default: none",
    )
    file: bool = Field(default=True, description="write traces/trace.json, which Perfetto loads, in the run directory")
    file_limit: Size = Field(
        default=64 * 1024**2,
        ge=64 * 1024,
        description="maximum bytes of traces/, such as 64MiB; must be at least 64KiB; the oldest spans are removed "
        "first",
    )
    share: float = Field(
        default=0.05, ge=0, le=1, description="fraction of the tasks to trace, 0 to 1; every step is traced"
    )


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
        description="tracking server http://HOST:PORT, or sqlite:///FILE, which `mlflow ui` reads (make "
        "setup-mlflow-ui)",
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


class WarningKind(StrEnum):
    """What a warning is about. docs/reading.md explains each kind."""

    ZERO_VARIANCE = "zero-variance"
    REWARD_FLAT = "reward-flat"
    REWARD_FALLING = "reward-falling"
    ENTROPY_COLLAPSE = "entropy-collapse"
    KL_BLOW_UP = "kl-blow-up"
    MISMATCH = "mismatch"
    TRUNCATION = "truncation"
    LENGTH_HACKING = "length-hacking"
    GRADIENT = "gradient"
    LEARNING_RATE = "learning-rate"
    OVERFITTING = "overfitting"
    EXPLAINED_VARIANCE = "explained-variance"
    STALENESS = "staleness"
    TRAINER_STARVED = "trainer-starved"
    ROLLOUTS_STARVED = "rollouts-starved"
    STORE_FULL = "store-full"
    MEMORY_TREND = "memory-trend"
    REWARD_SLOW = "reward-slow"
    REWARD_FAILING = "reward-failing"


def _known(kinds: tuple[str, ...]) -> tuple[str, ...]:
    names = [str(kind) for kind in WarningKind]
    for kind in kinds:
        if kind not in names:
            raise ValueError(not_one_of(kind, names))
    return kinds


class Warnings(Section):
    off: Annotated[Strings, AfterValidator(_known)] = Field(
        default=(), description="kinds of warnings that are not issued, such as trainer-starved (see docs/reading.md)"
    )


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


class Monitor(Section):
    samples: Samples | None = Field(
        default_factory=Samples, description="which samples are written to samples/; null: none"
    )
    wandb: Wandb | None = Field(default=None, description="also report to Weights & Biases")
    tensorboard: Tensorboard | None = Field(default=None, description="also write TensorBoard's event files")
    mlflow: Mlflow | None = Field(default=None, description="also report to MLflow")
    trackio: Trackio | None = Field(default=None, description="also report to trackio")
    web: Web | None = Field(default=None, description="the page of the run in a browser; default: none")
    prometheus: Prometheus | None = Field(
        default=None, description="serve the live values to Prometheus (make setup-observability); default: off"
    )
    warnings: Warnings = Field(default_factory=Warnings, description="warnings about the run")
    traces: Traces | None = Field(default=None, description="trace tasks and steps across processes; default: off")

    @property
    def exports(self) -> bool:
        """Whether the run has an exporter."""
        return self.prometheus is not None or self.traces is not None

    @property
    def traced_share(self) -> float | None:
        """The share of the tasks that are traced, 0 to 1, or None if the run has no traces."""
        return self.traces.share if self.traces is not None else None

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The experiment trackers of the run, by key. Instance n of the service `tracker` feeds the n-th tracker."""
        sections = {
            "wandb": self.wandb,
            "tensorboard": self.tensorboard,
            "mlflow": self.mlflow,
            "trackio": self.trackio,
        }
        return {name: section for name, section in sections.items() if section is not None}


def check(monitor: Monitor) -> Found:
    """Yield a problem if others can reach an address without a token, or if no trace would be kept."""
    for name, section in (("web", monitor.web), ("prometheus", monitor.prometheus)):
        if section is not None and section.token is None and not is_loopback(split_address(section.listen)[0]):
            message = f"{section.listen}: others reach this address, and monitor.{name}.token is not set"
            yield (*_MONITOR, name, "listen"), f"{message}; set it ({_MAKE}), or listen on 127.0.0.1"
    if monitor.traces is not None and monitor.traces.otlp is None and not monitor.traces.file:
        message = "no span would be kept: file is false and otlp is not set; set one, or remove the section"
        yield (*_MONITOR, "traces"), message


def token_problems(monitor: Monitor) -> Found:
    """Yield the problems with the token files. Only the host of the page and the exporter has these files."""
    files = {("web", key): getattr(monitor.web, key, None) for key in ("token", "operator_token")}
    files["prometheus", "token"] = monitor.prometheus.token if monitor.prometheus is not None else None
    tokens: dict[tuple[str, str], str] = {}
    for key, file in files.items():
        if file is not None:
            try:
                tokens[key] = read_token(file)
            except TokenError as error:
                yield (*_MONITOR, *key), str(error)
    operators = ("web", "operator_token")
    if operators in tokens and tokens[operators] == tokens.get(("web", "token")):
        yield (*_MONITOR, *operators), f"{files[operators]}: the same token as monitor.web.token; make another"
