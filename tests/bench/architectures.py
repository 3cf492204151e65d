"""The verdict of the proof of passes for every causal architecture of transformers, as a table.

    python -m tests.bench.architectures [MODEL_TYPE ...]

A configuration is the library's default for the architecture, or a real model's settings where the default cannot be
built. Each is proved as before a run, in a process with the same limits, but nothing is kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launch.checks import model_proof

SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""Settings without which the library's default configuration cannot be built."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    print(f"{'architecture':<26}{'sequences':<11}{'head':<8}{'decoder':<13}{'parameters':>11}{'layers':>7}{'cpu s':>7}")
    for kind in arguments.kinds:
        try:
            config = AutoConfig.for_model(kind, **SETTINGS.get(kind, {}))
            row = _proved(config)
        except Exception as error:  # as the library's default may be invalid
            print(f"{kind:<26}{(str(error).splitlines() or ['?'])[0][:120]}")
            counts["without a configuration or a verdict"] += 1
            continue
        counts["refused" if row["refused"] else "plain" if not row["parameters"] else row["sequences"]] += 1
        why = f"refused: {row['refused']}" if row["refused"] else "; ".join(row["reasons"])
        print(
            f"{kind:<26}{row['sequences']:<11}{row['head']:<8}{row['decoder']:<13}{row['parameters']:>11,}"
            f"{row['layers']:>7}{row['cpu_s']:>7.1f}  {why[:150]}",
            flush=True,
        )
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))


def _proved(config: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        found = model_proof.compute(Path(folder), None)
    if isinstance(found, str):
        raise ValueError(f"no proof: {found}")
    return found


if __name__ == "__main__":
    main()
