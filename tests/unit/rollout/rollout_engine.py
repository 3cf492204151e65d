"""Provides the rollout's tests with the embedded engine and the tiny models of the recipes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from services.rollout.engine import Generation, Prompt, SamplingParams
from services.rollout.engines.transformers_engine import TransformersEngine
from shared.topology.passes import FASTEST

MODELS = Path(__file__).parents[3] / "launch" / "topologies" / "models"
MODEL, TOOLS_MODEL = MODELS / "tiny-qwen3", MODELS / "tiny-tools"


def engine(*, deterministic: bool = True) -> TransformersEngine:
    """Return a started engine, which the caller must stop."""
    made = TransformersEngine(model=MODEL, dtype="float32", threads=1, deterministic=deterministic, passes=FASTEST)
    asyncio.run(made.start())
    return made


def generate(made: TransformersEngine, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Generation]]:
    return asyncio.run(made.generate(prompts, sampling, threading.Event()))


def sampling(
    samples: int = 4,
    temperature: float = 1.0,
    max_new_tokens: int = 8,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    block_rows: int = 0,
) -> SamplingParams:
    return SamplingParams(samples, temperature, max_new_tokens, seed, stop, block_rows)
