"""A store that kills itself after retiring one file.

`python -m tests.integration.batch_store.dying_store --run DIR`
"""

from __future__ import annotations

import os
import signal
import sys

from services.batch_store.files import StoreFiles
from services.batch_store.room import Removal
from services.batch_store.server import StoreService
from shared.actor.process import run_process

_retire = StoreFiles.retire


def retire_and_die(files: StoreFiles, effect: Removal) -> None:
    """Run the original method once, then kill the process."""
    _retire(files, effect)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    StoreFiles.retire = retire_and_die  # type: ignore[method-assign]
    sys.exit(run_process(StoreService, "batch_store"))
