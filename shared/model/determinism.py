"""Makes torch refuse what gives other bits every time (`run.deterministic`). Must never choose a number of threads:
that is the topology's, and another one has other bits.
"""

from __future__ import annotations

import os

import torch


def require_deterministic_algorithms() -> None:
    """For the whole process, before its first kernel: an operation that has no deterministic form raises from here on.

    Source: torch's notes on reproducibility; cuBLAS wants its workspace fixed before it is first used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
