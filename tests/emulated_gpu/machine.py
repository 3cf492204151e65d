"""A machine with emulated GPUs: the environment variables that make a process, and those that it starts, see them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-emulated"
PYTHON = ENVIRONMENT / "bin" / "python"
BUILT = ENVIRONMENT / "emulated-gpu"
"""Folder of the compiled stand-ins."""
PRELOADED = ("libcudart.so", "libnccl.so.2")
H200_BYTES = 141 << 30


@contextmanager
def machine(gpus: int = 1, *, seed: int = 0, nbytes: int = H200_BYTES, late: bool = True) -> Iterator[dict[str, str]]:
    """Yield the variables of a machine with `gpus` GPUs of `nbytes` bytes.

    The order in which late work takes effect is drawn from `seed`; with `late` false, nothing is late.
    """
    run = secrets.token_hex(4)
    path = [str(BUILT), str(ENVIRONMENT / "bin"), os.environ["PATH"]]
    variables = dict(os.environ)
    variables |= {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),  # the launcher counts device files otherwise
        "EMULATED_GPU_RUN": run,
        "EMULATED_GPU_COUNT": str(gpus),
        "EMULATED_GPU_BYTES": str(nbytes),
        "EMULATED_GPU_SEED": str(seed),
        "EMULATED_GPU_LATE": str(int(late)),
        "LD_LIBRARY_PATH": str(BUILT),
        "LD_PRELOAD": ":".join(str(BUILT / name) for name in PRELOADED),
        "PATH": ":".join(path),
        "HF_HUB_OFFLINE": "1",
    }
    try:
        yield variables
    finally:
        for file in Path("/dev/shm").glob(f"emulated-*-{run}-*"):
            file.unlink()
