"""The section `lora` of a model, and what can be known about an adapter without loading the model.

Adapters follow the names and the file format of the library peft, so that either side reads what the other has written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from shared.topology.fields import LocalPath, Section, Strings, format_size

MAX_RANK = 512
ALL_LINEAR, WITH_HEAD = "all-linear", "all-linear-and-head"
"""Values of `target_modules` that stand for the linear layers of the decoder's layers, without and with the head."""
MIN_LIVE = 2
"""Minimum number of adapters with which an engine samples at the same time, so that none waits for another's end."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM's slots can have (`max_lora_rank`). An adapter of another rank is padded with zeros."""
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter in peft's format."""
FOLDER = "adapter"
"""The folder of an adapter within an export."""
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_rslora": "its product is scaled by alpha / sqrt(rank), and here by alpha / rank",
        "use_dora": "magnitudes are not computed here",
        "use_qalora": "pooled inputs are not computed here",
        "lora_dropout": "engines have no dropout, so they would compute something else than the trainer",
        "lora_bias": "adapters have no bias here",
        "modules_to_save": "only adapters are trained here",
        "trainable_token_indices": "only adapters are trained here",
        "target_parameters": "adapters belong to linear layers here",
        "rank_pattern": "all layers have one rank here",
        "alpha_pattern": "all layers have one alpha here",
        "layer_replication": "layers occur once here",
        "alora_invocation_tokens": "an adapter is on for every token here",
    }
)
"""Keys of `adapter_config.json` that change what an adapter computes or trains, each with the reason why they must have
no value (none, false, 0 or empty)."""
_STARTS = ("gaussian", "orthogonal", "eva")
"""Names of initialisations that leave the base as it is. Others, such as pissa, save an adapter of another base."""


class Lora(Section):
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = Field(
        description=f"columns of every adapter's A and B, from 1 to {MAX_RANK}; 32 suits most runs"
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0, description="an adapter's product is multiplied by alpha / rank; must be above 0"
    )
    target_modules: Literal["all-linear", "all-linear-and-head"] | Strings = Field(
        default="all-linear",
        description="the linear layers with an adapter: all-linear (those of the decoder's layers), "
        "all-linear-and-head (also the one that computes the logits), or names such as q_proj or lm_head",
    )
    exclude_modules: Strings = Field(default=(), description="names of linear layers that get no adapter")
    adapter_path: LocalPath | None = Field(
        default=None, description="folder of an adapter in peft's format from which training begins; default: a new one"
    )
    export_merged: bool = Field(
        default=True, description="also export the whole model, with the adapter merged into its weights"
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank


def is_called(module: str, wanted: str) -> bool:
    """Return whether a module is called `wanted`: its whole name, or the end of it."""
    return module == wanted or module.endswith(f".{wanted}")


def live_adapters(in_flight: str, max_models: int | None) -> int:
    """Return the maximum number of adapters with which an engine samples at the same time. In a training run, whose
    `max_models` is None, newer weights may take the place of others (`services.rollout.in_flight`)."""
    if max_models is not None:
        return max(MIN_LIVE, max_models)
    return MIN_LIVE if in_flight == "wait" else 1


def vllm_slots(live: int) -> int:
    """Return the number of adapters for which a vLLM engine has room. One is the drill's."""
    return max(MIN_LIVE, live) + 1


def vllm_rank(rank: int) -> int:
    """Return the rank of vLLM's slots for adapters of `rank`."""
    return next(size for size in VLLM_RANKS if size >= rank)


class AdapterPlan(msgspec.Struct, frozen=True):
    """The layers and parameters of an adapter that a run would train."""

    refused: str = ""
    """Why the model cannot have the adapter, or an empty string."""
    layers: dict[str, int] = {}
    """The number of adapted layers, by the last part of their names."""
    left: dict[str, str] = {}
    """The linear layers without an adapter, by name, each with the reason."""
    parameters: int = 0

    def lines(self, base: int, itemsize: int) -> list[str]:
        """Return lines for human readers. `base` is the number of parameters of the model, and `itemsize` the size in
        bytes of a weight of a version."""
        whole, nbytes = base + self.parameters, format_size(self.parameters * itemsize)
        share = f"{self.parameters:,} of {whole:,} parameters ({self.parameters / whole:.1%})"
        reasons: dict[str, Counter[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, Counter())[name.rpartition(".")[2]] += 1
        return [
            f"{_counted(self.layers)}: trains {share}; {nbytes} a sync",
            *(f"not adapted: {_counted(names)} ({reason})" for reason, names in reasons.items()),
        ]


def _counted(layers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in layers.items())


@dataclass(frozen=True)
class AdapterConfig:
    """The contents of `adapter_config.json`. `base` is the name or path of the model under the adapter, or empty."""

    rank: int
    alpha: float
    base: str


def read_adapter_config(folder: str) -> AdapterConfig:
    """Return the configuration of the adapter in `folder`, which is in peft's format.

    Raises a one-line ValueError if the folder does not hold one, or if the adapter computes or trains what is not
    supported here, and OSError.
    """
    for name in (CONFIG, TENSORS):
        if not (Path(folder) / name).is_file():
            remedy = "name a folder that peft's save_pretrained or a run (export/adapter) has written"
            raise ValueError(f"{folder} has no {name}, which every adapter has; {remedy}")
    file = Path(folder) / CONFIG
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ValueError(f"{file}: peft_type is {kind!r}, but only LORA is supported; leave out adapter_path")
    why = {key: reason for key, reason in _REFUSED.items() if config.get(key)}
    if config.get("bias", "none") != "none":
        why["bias"] = "the biases of the base do not change here"
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _STARTS:
        why["init_lora_weights"] = "such an adapter belongs to changed weights, not to those of the base"
    for key, reason in why.items():
        raise ValueError(f"{file}: {key} is {config[key]!r}, but {reason}; use an adapter without it")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not 1 <= rank <= MAX_RANK or alpha <= 0:
        limits = f"a rank from 1 to {MAX_RANK} and an alpha above 0"
        raise ValueError(f"{file}: r is {rank!r} and lora_alpha is {alpha!r}, but an adapter has {limits}")
    return AdapterConfig(rank, float(alpha), str(config.get("base_model_name_or_path") or ""))


def differences(lora: Lora, folder: str) -> dict[str, str]:
    """Return the keys of `lora` whose values are not those of the adapter in `folder`, with both values. Raises the
    errors of `read_adapter_config`."""
    config = read_adapter_config(folder)
    pairs = {"rank": (lora.rank, config.rank), "alpha": (lora.alpha, config.alpha)}
    return {
        key: f"{wanted:g}, but the adapter in {folder} has {given:g}"
        for key, (wanted, given) in pairs.items()
        if wanted != given
    }
