"""Exports the policy as a Hugging Face folder that can be loaded like the original. Weights are not pickled."""

from __future__ import annotations

from pathlib import Path

from services.policy_trainer.worker.backend import Backend
from shared import model_folder


def export(backend: Backend, policy_dir: Path, target: Path) -> None:
    """Write the model, the configuration and the tokenizer files of `policy_dir` and move them to `target`, replacing
    any earlier export.

    Every rank must call this; rank 0 writes. Raises OSError (no space, no permission).
    """
    leads = backend.place.rank == 0
    backend.export(model_folder.begin(target) if leads else target)
    if leads:
        model_folder.finish(policy_dir, target)
