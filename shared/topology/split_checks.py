"""Whether the trainer's model can be split as the topology says: degrees against the backend and against the model's
own numbers, read from its config.json. Never imports a model library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from shared.topology.problem import Path
from shared.topology.schema import Topology

Found = Iterator[tuple[Path, str]]

MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3")
_TRAINER = ("services", "policy-trainer")


def check(topology: Topology) -> Found:
    """Degrees that the backend does not have, and degrees that do not divide what they split."""
    trainer = topology.services.policy_trainer
    degrees = {"tp": trainer.parallel.tp, "pp": trainer.parallel.pp}
    if trainer.backend == "torch":
        for name, degree in degrees.items():
            if degree > 1:
                message = f"{degree} splits layers, which backend torch does not; set backend megatron, or use 1"
                yield (*_TRAINER, "parallel", name), message
        return
    if topology.policy.dtype not in ("float32", "bfloat16"):
        yield ("policy", "dtype"), f"{topology.policy.dtype}: backend megatron trains float32 or bfloat16"
    config = _config(topology.policy.model)
    kind = config.get("model_type")
    if kind is not None and kind not in MEGATRON_FAMILIES:
        message = f"megatron knows {', '.join(MEGATRON_FAMILIES)}, the model is a {kind}; use torch"
        yield (*_TRAINER, "backend"), message
        return
    heads = config.get("num_attention_heads")
    for name, what, count in (
        ("tp", "attention heads", heads),
        ("tp", "key-value heads", config.get("num_key_value_heads") or heads),
        ("tp", "columns of the feed-forward layer", config.get("intermediate_size")),
        ("pp", "layers", config.get("num_hidden_layers")),
    ):
        if isinstance(count, int) and count % degrees[name]:
            message = f"{degrees[name]} does not divide the model's {count} {what}, use a divisor"
            yield (*_TRAINER, "parallel", name), message


def _config(model: str) -> dict[str, Any]:
    try:
        config = json.loads((FilePath(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # whether the file is there is checked elsewhere, its content is the model library's to judge
    return config if isinstance(config, dict) else {}
