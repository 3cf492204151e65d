"""Sends trackers the data that they lack after a run has ended: `python -m services.tracker.rest --run DIR NAME...`.

`ctl track` starts it. Exit status: 0 if the trackers have everything, 1 if one does not, and 2 if the run is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from services.tracker import ledger
from services.tracker.outlet import Outlet, end_of, finish
from shared import topology
from shared.actor import logging
from shared.rpc.errors import RpcError
from shared.rundir import RunDir


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.tracker.rest")
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("names", nargs="+", help="wandb, tensorboard, mlflow or trackio")
    arguments = parser.parse_args()
    try:
        run = RunDir.open(arguments.run)
        loaded = topology.load_resolved(run.topology)
        ledger.hold(run.path)
        logging.configure(run.log_file("tracker", 0), service="tracker", instance=0, run=run.name)
    except RpcError as error:
        print(error, file=sys.stderr)
        return 2
    outlets = [Outlet(run, loaded, name) for name in arguments.names]
    end = end_of(run)
    for outlet in outlets:
        outlet.start(end)
    finish(outlets, end)
    lacking = False
    for outlet in outlets:
        if rest := outlet.given_up or ledger.unsent(run.path, outlet.name):
            print(rest, file=sys.stderr)
            lacking = True
        else:
            print(f"{outlet.name}: has every step and the end of the run")
    return 1 if lacking else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a tracker library waits at exit, and its threads can hang
