"""Runs a service as a process: parses arguments, handles signals and exits when its supervisor does."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shared.actor import logging
from shared.actor.service import DRAIN_S, Service, install_signals
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, release
from shared.stacks import write_stacks_on_signal

_PR_SET_PDEATHSIG = 1
EXIT_GRACE_S = 2 * DRAIN_S


def parse_arguments(name: str, models: Sequence[str] = ()) -> argparse.Namespace:
    """Parse `--run DIR --instance N --listen ENDPOINT`, and `--supervisor` and `--parent`, which a launcher adds. With
    `models`, also parse `--model NAME`, whose default is the first of them."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}")
    parser.add_argument("--run", type=Path, required=True, help="run directory with its topology.yaml")
    parser.add_argument("--instance", type=int, default=0, help="index of the instance, from 0")
    parser.add_argument(
        "--listen", default="", metavar="tcp://ADDRESS:PORT", help="also answer other hosts; port 0 picks a free one"
    )
    if models:
        names = " or ".join(models)
        parser.add_argument(
            "--model", default=models[0], help=f"the model of the process: {names}; default: {models[0]}"
        )
    parser.add_argument("--supervisor", default="", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=os.getppid(), help=argparse.SUPPRESS)
    return parser.parse_args()


def die_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the supervisor dies for any reason, so that no orphans remain."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def run_process(
    services: type[Service] | Mapping[str, type[Service]] | Callable[[RunDir], type[Service]], module: str
) -> int:
    """Run a service until it stops and return the exit status. If there are several `services`, the argument `--model`
    names one of them, the first by default, or a function chooses by the run.

    The status is 0 if it stopped, 1 if it failed, 2 for a bad command line, 75 (`PEER_LOST_STATUS`) if it ended because
    another process is gone, and 78 (`UNUSABLE_STATUS`) if a restart would not help.
    """
    classes = services if isinstance(services, Mapping) else {}
    arguments = parse_arguments(module, [*classes])
    if classes and arguments.model not in classes:
        names = " or ".join(classes)
        print(f"services.{module}: --model {arguments.model}: no such model; use {names}", file=sys.stderr)
        return 2
    write_stacks_on_signal(os.dup(sys.stderr.fileno()), all_threads=True)
    if arguments.supervisor:
        die_with_parent()
        if os.getppid() != arguments.parent:
            return 1  # the supervisor died before prctl was called
    try:
        run = RunDir.open(arguments.run)
    except RpcError as error:
        print(f"services.{module}: {error}", file=sys.stderr)
        return 2
    if isinstance(services, Mapping):
        service_class = services[arguments.model]
    else:
        service_class = services if isinstance(services, type) else services(run)
    status = asyncio.run(_live(service_class, run, arguments))
    _exit_for_sure(status)
    return status


async def _live(service_class: type[Service], run: RunDir, arguments: argparse.Namespace) -> int:
    locks = run.hold()
    try:
        service = _made(service_class, run, arguments)
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
        release(locks)


def _made(service_class: type[Service], run: RunDir, arguments: argparse.Namespace) -> Service:
    """Return the service. If it cannot be constructed, return one that reports the reason and fails."""
    try:
        return service_class(run, arguments.instance, arguments.supervisor)
    except Exception as error:
        reason = error

    class Unmade(Service):
        NAME = service_class.NAME
        HEARTBEATS = False

        def bind(self) -> str:
            raise reason

    return Unmade(run, arguments.instance, arguments.supervisor)


def _exit_for_sure(status: int) -> None:
    """Exit after `EXIT_GRACE_S` even if a worker thread is stuck, for example in a GPU kernel."""
    if any(thread.is_alive() and not thread.daemon for thread in threading.enumerate()[1:]):
        timer = threading.Timer(EXIT_GRACE_S, os._exit, (status,))
        timer.daemon = True
        timer.start()
