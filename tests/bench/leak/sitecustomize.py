"""Plants a leak: the process that runs the module SOAK_LEAK keeps SOAK_LEAK_BYTES more bytes in every second.

Python imports this module at startup when PYTHONPATH names this folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time


def _leak(bytes_per_s: int) -> None:
    kept = []
    while True:
        kept.append(os.urandom(bytes_per_s))
        time.sleep(1.0)


if os.environ.get("SOAK_LEAK") in sys.orig_argv:
    threading.Thread(target=_leak, args=(int(os.environ["SOAK_LEAK_BYTES"]),), daemon=True).start()
