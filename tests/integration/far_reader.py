"""A service that reads shards as if from another host: `python -m tests.integration.far_reader --run D MODULE`.

Its puts are unchanged, because a store that accepts puts is on the same host.
"""

from __future__ import annotations

import functools
import runpy
import sys

from shared.dataplane.client import DataClient
from shared.dataplane.reach import Reach

if __name__ == "__main__":
    module = sys.argv.pop()
    DataClient.__init__ = functools.partialmethod(DataClient.__init__, reach=Reach.STREAM)  # type: ignore[method-assign,assignment]
    runpy.run_module(f"services.{module}", run_name="__main__", alter_sys=True)
