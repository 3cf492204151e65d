"""Sends a tracker the data that it lacks after a run has ended: `python -m services.tracker.rest --run DIR NAME`.

`ctl track` starts it. Exit status: 0 if the tracker has everything, 1 if it does not, and 2 if the run or the name is
wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from services.tracker import ledger
from services.tracker.exporter import missing
from services.tracker.feeder import Feeder, end_of
from shared import topology
from shared.actor import logging
from shared.rpc.errors import RpcError
from shared.rundir import RunDir


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.tracker.rest")
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("name", help="wandb, tensorboard, mlflow or trackio")
    arguments = parser.parse_args()
    name = str(arguments.name)
    try:
        run = RunDir.open(arguments.run)
        loaded = topology.load_resolved(run.topology)
        if lacking := missing(name):
            print(f"{name}: {', '.join(lacking)} not installed; run `make setup-trackers`", file=sys.stderr)
            return 2
        ledger.hold(run.path, name)
        instance = list(loaded.services.monitor.trackers).index(name)
        logging.configure(run.log_file("tracker", instance), service="tracker", instance=instance, run=run.name)
    except RpcError as error:
        print(error, file=sys.stderr)
        return 2
    feeder = Feeder(run, loaded, name)
    feeder.end(end_of(run))
    feeder.run()
    rest = feeder.refused or ledger.unsent(run.path, name)
    print(rest or f"{name}: has every step and the end of the run", file=sys.stderr if rest else sys.stdout)
    return 1 if rest else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a tracker library waits at exit, and its threads can hang
