"""The section `serve`, which turns a cluster into a server: clients bring data, losses and optimizer options over HTTP.

A topology describes a cluster (the policy, services, hosts, limits) and what runs on it: either a training run or, with
this section, a server. The keys of the one are errors beside the keys of the other.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from shared.topology.algorithm import NO_REWARD
from shared.topology.document import Found
from shared.topology.document import Path as KeyPath
from shared.topology.fields import Count, LocalPath, Section, Size
from shared.topology.lora import MAX_RANK, WITH_HEAD
from shared.topology.monitor import check_address, is_loopback, split_address
from shared.topology.services import Placement, Services

MAX_MODELS = 64
MADE_KEYS = "clients.keys"
"""Name of the file, in the run's folder of keys, with the key that is made for a run without `keys`."""
KEY_FORM = "tml-"
"""How a client's key begins. The Tinker SDK refuses others."""
MIN_KEY = 20
"""Minimum number of characters in a key."""
_SERVE = ("serve",)

TRAINING_RUN: Mapping[str, Any] = MappingProxyType(
    {
        "data": {"train": {"source": "builtin:addition", "max_prompt_tokens": 1}},
        "reward": {"function": NO_REWARD},
        "workflow": None,
        "sampling": {"max_new_tokens": 1},
        "staleness": 1,
        "consume": "order",
        "algorithm": {"tasks_per_step": 1, "group_size": 1, "advantage": {"name": "none"}},
        "optimizer": {"lr": 1e-4},
        "critic": None,
        "teacher": None,
        "reward_model": None,
        "gc": {},
        "run.steps": 1,
        "run.evaluate": False,
        "run.on_bad_step": "stop",
        "policy.lora": None,
        "services.critic": None,
        "services.reference": None,
        "services.teacher": None,
        "services.reward-model": None,
        "checkpoint.keep_best": None,
        "checkpoint.memory_every": 1,
        "monitor.samples": None,
    }
)
"""The keys that belong to a training run, each with a value that a server has in its place. Nothing computes with these
values, because a server admits no task."""


class Serve(Section):
    listen: Annotated[str, AfterValidator(check_address)] = Field(
        default="127.0.0.1:8787", description="address and TCP port of the server"
    )
    keys: LocalPath | None = Field(
        default=None,
        description="file with a line `name tml-…` for each client's key, readable by its owner only; required if "
        "other machines can reach the address; default: one key, made in the run's folder keys/",
    )
    models: dict[str, Literal["policy"]] = Field(
        description="names by which clients ask for a model, each with the section that describes the model",
        min_length=1,
    )
    max_rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = Field(
        default=32, description=f"maximum rank of a client's adapter, from 1 to {MAX_RANK}"
    )
    max_models: Annotated[int, Field(ge=1, le=MAX_MODELS)] = Field(
        default=8,
        description=f"clients' models with training state in memory, from 1 to {MAX_MODELS}; others wait on disk",
    )
    full_training: bool = Field(default=False, description="clients train all weights (rank 0) instead of adapters")
    body_limit: Size = Field(default=8 * 1024**2, description="maximum bytes of a request, such as 8MiB")
    model_requests: Count = Field(default=256, description="maximum requests of a model that are not done")
    key_requests: Count = Field(default=1024, description="maximum requests of a key that are not done")


def in_plain(data: Mapping[str, Any], key: str) -> Any:
    """Return the value of the dotted `key` in plain data, or None."""
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def fill(data: dict[str, Any]) -> None:
    """Fill in what belongs to a training run, if `data` describes a server."""
    serve = data.get("serve")
    if not isinstance(serve, dict):
        return
    for key, value in {**TRAINING_RUN, "policy.lora": adapter_slots(serve)}.items():
        *sections, last = key.split(".")
        below: Any = data
        for section in sections:
            below = _section_of(below, section) if isinstance(below, dict) else None
        if isinstance(below, dict) and below.get(last) is None:
            below[last] = _copied(value)


def _section_of(data: dict[str, Any], name: str) -> Any:
    if data.get(name) is None:
        data[name] = {}
    return data[name]


def adapter_slots(serve: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the adapter whose slots hold those of all clients: of the largest rank, on every linear layer, and with
    scale 1, because each adapter has a scale of its own."""
    if serve.get("full_training"):
        return None
    rank = serve.get("max_rank", Serve.model_fields["max_rank"].default)
    alpha = float(rank) if isinstance(rank, int) else rank
    return {"rank": rank, "alpha": alpha, "target_modules": WITH_HEAD, "export_merged": False}


def without_training_run(document: dict[str, Any]) -> dict[str, Any]:
    """Return the plain data of a server's topology without the keys of a training run."""
    left: dict[str, Any] = _copied(document)
    for key in TRAINING_RUN:
        *sections, last = key.split(".")
        below = left
        for section in sections:
            below = below[section]
        below.pop(last, None)
    return left


def misplaced(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the keys that were given although they belong to a training run, and `data` describes a server."""
    if not isinstance(data.get("serve"), Mapping):
        return
    for key in TRAINING_RUN:
        if in_plain(data, key) is not None:
            why = (
                "clients choose their adapters" if key == "policy.lora" else "clients send what a training run has here"
            )
            yield (
                (*key.split("."),),
                f"belongs to a training run, but there is a section serve: {why}; remove one of them",
            )


def check(serve: Serve, services: Services, placement: Placement) -> Found:
    """Yield what is wrong with the section and what a server cannot work with, apart from the contents of the file of
    keys (`read_keys`)."""
    trainer, rollout, whole = services.policy_trainer, services.rollout, serve.full_training
    if trainer.backend != "torch":
        why = "cannot switch between clients' models" if whole else "has no adapters, which a server's clients train"
        yield ("services", "policy-trainer", "backend"), f"{trainer.backend} {why}; use torch"
    if rollout.engine == "openai":
        what = "the weights" if whole else "an adapter"
        message = f"openai cannot prove that its server computes with {what} of a client; use transformers or vllm"
        yield ("services", "rollout", "engine"), message
    if rollout.weights != "shards":
        why = "sends only the newest version of one model" if whole else "is for whole models"
        message = (
            f"{rollout.weights} {why}, but a server's clients train {'several' if whole else 'adapters'}; use shards"
        )
        yield ("services", "rollout", "weights"), message
    if placement.colocate:
        yield ("placement", "colocate"), "a server's trainer and engines do not take turns on devices; leave it out"
    host, _ = split_address(serve.listen)
    if serve.keys is None and not is_loopback(host):
        message = f"{serve.listen} can be reached from other machines, so it needs keys; set serve.keys"
        yield (*_SERVE, "listen"), f"{message}, or listen on 127.0.0.1"


class KeysError(ValueError):
    """A file of keys cannot be used. The message is one line that names the file, the fault and the remedy."""


def read_keys(file: str) -> dict[str, str]:
    """Return the keys in `file`, by the name of the client. Raises KeysError."""
    path = Path(file)
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise KeysError(f"{file}: {why}; write a line `name tml-…` for each client") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeysError(f"{file}: others may read it (mode {stat.S_IMODE(mode):04o}); run chmod 600 {file}")
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = words[0], words[-1]
        fault = _key_fault(words)
        if not fault and (name in keys or key in keys.values()):
            fault = f"the {'name' if name in keys else 'key'} of {name} occurs twice"
        if fault:
            raise KeysError(f"{file}:{number}: {fault}; write `name {KEY_FORM}…`")
        keys[name] = key
    if not keys:
        raise KeysError(f"{file}: no key in it; write a line `name {KEY_FORM}…` for each client")
    return keys


def _key_fault(words: list[str]) -> str:
    if len(words) != 2:
        return f"{len(words)} words instead of 2"
    if not words[1].startswith(KEY_FORM) or not words[1].isascii() or len(words[1]) < MIN_KEY:
        return f"the key of {words[0]} must begin with {KEY_FORM} and have {MIN_KEY} ASCII characters or more"
    return ""


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value
