"""A run with simulated services. A real monitor process receives their telemetry over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq

from proto.ids import new_incarnation
from proto.messages import GetSnapshot, Snapshot
from shared.actor.telemetry import TelemetrySender
from shared.rpc.client import Client
from shared.rundir import RunDir
from tests.integration.tiny.harness import ROOT, environment

CALL_S = 20.0
SERVICES = ("policy-trainer/0", "policy-trainer-worker/0", "reference/0", "rollout/0", "rollout/1", "scheduler/0")


def metrics_row(step: int, *, offset: float = 0.0) -> dict[str, float]:
    """Return a metrics row like those that a run writes."""
    share = step / 200
    return {
        "step": step,
        "policy/version": step,
        "policy/entropy": 1.2 - share / 2,
        "policy/clip_fraction": 0.02 + 0.01 * math.sin(step / 5),
        "policy/masked_fraction": 0.0,
        "policy/grad_norm": 0.8 + 0.3 * math.cos(step / 3),
        "loss/policy": -0.01 * math.sin(step),
        "loss/kl": 0.001 * step,
        "reward/mean": 0.3 + 0.5 * share + 0.05 * math.sin(step / 2) + offset,
        "rollout/length_mean": 4.0 + share,
        "rollout/truncated_fraction": 0.01,
        "rollout/zero_variance_fraction": 0.2 + share / 3,
        "rollout/staleness_mean": 0.8,
        "rollout/staleness_max": 1.0,
        "rollout/logprob_mismatch": 0.0004,
        "rollout/logprob_mismatch_engine": 0.0002,
        "time/step": 0.7,
        "time/wait_batch": 0.2,
        "time/forward_backward": 0.4,
        "time/publish": 0.05,
        "throughput/tokens_per_s": 5100.0 + 20 * step,
        **({"eval/held-out/reward": 0.3 + share / 2} if step % 20 == 0 else {}),
    }


class PlayedRun:
    """The services of a run, as the monitor sees them."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.step = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._clients: list[Client] = []
        self._senders: dict[str, TelemetrySender] = {}

    def sender(self, name: str) -> TelemetrySender:
        """Return the telemetry sender of a service. Must be called while the event loop is running."""
        if name not in self._senders:
            service, _, instance = name.rpartition("/")
            incarnation = new_incarnation()
            client = Client(self._context, self.run.endpoint("monitor", 0), "monitor/0", incarnation)
            self._clients.append(client)
            sender = self._senders[name] = TelemetrySender(service, int(instance), incarnation)
            sender.connect(client)
        return self._senders[name]

    def write_steps(self, count: int) -> None:
        """Write the rows of the next steps to metrics.jsonl."""
        with self.run.metrics.open("a") as file:
            for _ in range(count):
                self.step += 1
                file.write(json.dumps(metrics_row(self.step)) + "\n")

    def emit_all(self) -> None:
        """Send one round of the telemetry that services send every second."""
        for number, name in enumerate(SERVICES):
            sender = self.sender(name)
            sender.emit("service", {"state": "READY", "cause": ""})
            sender.emit(
                "process",
                {"host": "node-1", "pid": 100.0 + number, "incarnation": f"{number:016x}", "rss_bytes": 3e8,
                 "cpu_share": 0.4, "progress_age_s": 0.5, "gpu_bytes": 2.5 * (1 << 30)},
            )  # fmt: skip
        scheduler = self.sender("scheduler/0")
        scheduler.emit("scheduler/tasks", {"PENDING": 4.0, "LEASED": 8.0, "READY": 3.0, "COLLECTED": 100.0})
        scheduler.emit("scheduler/leases", {"live": 2.0, "waiting": 1.0, "stage/rollout": 2.0, "stage/reference": 0.0})
        if self.step:
            scheduler.emit("step", {**metrics_row(self.step)})
        driver = self.sender("policy-trainer/0")
        driver.emit("staleness", {"step": float(self.step), "0": 96.0, "1": 160.0})
        driver.span("batch", 0.2, {"step": float(self.step)}, of="scheduler/0")
        driver.span("step", 0.5)
        self.sender("policy-trainer-worker/0").span("ForwardBackward", 0.4)
        for name in ("rollout/0", "rollout/1"):
            self.sender(name).span("generate", 0.45)
            self.sender(name).span("lease", 0.1, of="scheduler/0")
        self.sender("reference/0").span("lease", 0.6, of="scheduler/0")
        self.sender("reference/0").span("score", 0.1)
        self.sender("batch-store/0").emit(
            "store", {"bytes": 3e7, "limit_bytes": 6.4e7, "shards": 120.0, "busy": 3.0, "spilled_bytes": 0.0}
        )

    async def settle(self) -> Snapshot:
        """Return the monitor's state once the monitor has processed everything that was sent."""
        for sender in self._senders.values():
            sender.flush()
        found = Snapshot(sequence=0, rows=[], dropped=0)
        for client in self._clients:
            found = await client.call(GetSnapshot(), Snapshot, deadline_s=CALL_S)
        return found

    async def play(self, seconds: float) -> None:
        """Continue the run with one step and one round of telemetry per second."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.write_steps(1)
            self.emit_all()
            await asyncio.sleep(1.0)  # This paces the run.

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)


def play_steps(run: RunDir, steps: int) -> None:
    """Play `steps` steps, each until the monitor has it. They run on a thread of their own, because Playwright's event
    loop runs in that of a browser test."""

    async def play() -> None:
        played = PlayedRun(run)
        try:
            for _ in range(steps):
                played.write_steps(1)
                played.emit_all()
                await played.settle()
        finally:
            await played.close()

    with ThreadPoolExecutor() as other:
        other.submit(asyncio.run, play()).result()


def start_monitor(run: RunDir) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.monitor", "--run", str(run.path)],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def monitored(folder: Path) -> Iterator[RunDir]:
    """Create a run directory and start its monitor; at the end, kill the monitor and remove the shared memory."""
    run = RunDir.create(folder / "run", shm_root=folder / "shm")
    monitor = start_monitor(run)
    try:
        yield run
    finally:
        monitor.kill()
        monitor.wait()
        run.remove_volatile()
