"""Makes torch refuse non-deterministic operations (`run.deterministic`). The number of threads, which also affects the
bits, is set in the topology.
"""

from __future__ import annotations

import os

import torch


def require_deterministic_algorithms() -> None:
    """Make operations without a deterministic form raise in this process. Call it before the first kernel.

    Source: torch's notes on reproducibility. cuBLAS requires a fixed workspace before its first use.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
