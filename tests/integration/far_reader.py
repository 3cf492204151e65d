"""A service that reads shards as from another host: `python -m tests.integration.far_reader --run D MODULE`.

It puts as it does on one host: a store that takes its puts is near.
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
