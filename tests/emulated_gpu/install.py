"""`make setup-emulated-gpu`: compiles the stand-ins into the environment and lets its processes import the hook."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.emulated_gpu.machine import BUILT, ROOT

RUNTIME = Path(__file__).parent / "runtime"
LIBRARIES = {
    "libcudart.so": ("devices.c", "memory.c", "streams.c", "kernels.c"),
    "libcuda.so.1": ("driver.c",),
    "libnvidia-ml.so.1": ("management.c",),
    "libnccl.so.2": ("nccl.c",),
}
OPTIONS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-O1", "-shared", "-fPIC", "-pthread")
PATH_FILE = f"""import sys; sys.path.insert(0, {str(ROOT)!r})
import os; os.environ.get("EMULATED_GPU_RUN") and __import__("tests.emulated_gpu.hook")
"""


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    BUILT.mkdir(exist_ok=True)
    for library, sources in LIBRARIES.items():
        command = ["gcc", *OPTIONS, f"-Wl,-soname,{library}", f"-I{RUNTIME}", f"-I{packages / 'nvidia/cu13/include'}"]
        subprocess.run([*command, "-o", BUILT / library, *(RUNTIME / source for source in sources)], check=True)
    shutil.copy(RUNTIME / "nvidia-smi", BUILT)
    (packages / "rlbus.pth").write_text(PATH_FILE)


if __name__ == "__main__":
    main()
