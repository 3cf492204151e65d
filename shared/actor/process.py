"""Starts a service as a process: command line, signals, tie to the supervisor's life. One call in each __main__."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from shared.actor import logging
from shared.actor.service import DRAIN_S, Service, install_signals
from shared.rpc.errors import RpcError
from shared.rundir import RunDir

_PR_SET_PDEATHSIG = 1
EXIT_GRACE_S = 2 * DRAIN_S


def parse_arguments(name: str) -> argparse.Namespace:
    """`--run DIR --instance N`, and `--supervisor ENDPOINT` when a launcher starts the process."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}")
    parser.add_argument("--run", type=Path, required=True, help="run directory with its topology.yaml")
    parser.add_argument("--instance", type=int, default=0, help="which of several, from 0")
    parser.add_argument(
        "--listen", default="", metavar="tcp://ADDRESS:PORT", help="answer other hosts too, there; port 0: a free one"
    )
    parser.add_argument("--supervisor", default="", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=os.getppid(), help=argparse.SUPPRESS)
    return parser.parse_args()


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the supervisor dies, however it dies: no orphans."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def run_process(service_class: type[Service], module: str) -> int:
    """Run `service_class` until it stops; returns the exit status.

    0 stopped, 1 failed, 2 command line, 75 (`PEER_LOST_STATUS`) ended because another process is gone, 78
    (`UNUSABLE_STATUS`) refused at its start.
    """
    arguments = parse_arguments(module)
    if arguments.supervisor:
        die_with_parent()
        if os.getppid() != arguments.parent:
            return 1  # the supervisor died before we asked to be told
    try:
        run = RunDir.open(arguments.run)
    except RpcError as error:
        print(f"services.{module}: {error}", file=sys.stderr)
        return 2
    status = asyncio.run(_live(service_class, run, arguments))
    _exit_for_sure(status)
    return status


async def _live(service_class: type[Service], run: RunDir, arguments: argparse.Namespace) -> int:
    lock = run.hold()
    try:
        service = service_class(run, arguments.instance, arguments.supervisor)
        service.listen = arguments.listen
        logging.configure(
            run.log_file(service.NAME, service.instance),
            console=None if arguments.supervisor else sys.stderr,
            service=service.NAME,
            instance=service.instance,
            incarnation=service.incarnation,
            run=run.name,
        )
        install_signals(service, asyncio.get_running_loop(), supervised=bool(arguments.supervisor))
        status = await service.run_until_stopped()
        if status and not arguments.supervisor:
            print(f"{service.name}: {service.cause}", file=sys.stderr)
        return status
    finally:
        os.close(lock)


def _exit_for_sure(status: int) -> None:
    """A working thread stuck in a kernel must not keep a stopped process alive."""
    if any(thread.is_alive() and not thread.daemon for thread in threading.enumerate()[1:]):
        timer = threading.Timer(EXIT_GRACE_S, os._exit, (status,))
        timer.daemon = True
        timer.start()
