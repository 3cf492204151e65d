"""Unmodified recipes of the Tinker cookbook, run against a real cluster that serves. Asserts only that a recipe ends
well."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.topology.serve import read_keys
from tests.integration.whole_cluster import Cluster, cluster
from tests.tinker_recipes import MODEL, PYTHON, RECIPES, ROOT

SERVE = ROOT / "launch" / "topologies" / "recipes" / "serve.yaml"
LIMIT_S = 240
"""Maximum seconds that a recipe may take."""


@dataclass
class Running:
    """A cluster that serves, and the folder in which recipes find their model and data (`tests.tinker_recipes`)."""

    cluster: Cluster
    address: str
    key: str
    folder: Path
    log: Path

    def recipe(self, name: str, *arguments: str, watch: Callable[[int], None] | None = None) -> list[dict[str, float]]:
        """Run a recipe and return the rows of its metrics. `watch` is called with the number of each new row."""
        log = self.log / name
        environment = {"TINKER_BASE_URL": f"http://{self.address}", "TINKER_API_KEY": self.key, "HF_HUB_OFFLINE": "1"}
        self.log.mkdir(parents=True, exist_ok=True)
        with (self.log / f"{name}.err").open("w+") as errors:
            recipe = subprocess.Popen(
                [str(PYTHON), "-m", *RECIPES[name], *arguments, f"log_path={log}"],
                cwd=self.folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            until, seen = time.monotonic() + LIMIT_S, 0
            try:
                while recipe.poll() is None and time.monotonic() < until:
                    while watch is not None and seen < len(rows(log)):
                        watch(seen)
                        seen += 1
                    time.sleep(0.05)
            finally:
                recipe.kill()
                recipe.wait()
            errors.seek(0)
            assert recipe.returncode == 0, errors.read()[-3000:]
        return rows(log)


def rows(log: Path) -> list[dict[str, float]]:
    """Return the complete rows of metrics that a recipe has written."""
    file = log / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@contextlib.contextmanager
def serving(run: Path, folder: Path, *overrides: str, limit_s: float) -> Iterator[Running]:
    """Serve in `run`, with recipes that read `folder`; interrupt the cluster at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    run.mkdir(parents=True, exist_ok=True)
    overrides = (f"serve.listen={address}", f"policy.model={folder / MODEL}", *overrides)
    with cluster(SERVE, run, *overrides, limit_s=limit_s) as one:
        one.wait_for("all are READY", lambda: one.pid("policy-trainer") and one.pid("rollout"))
        (key,) = read_keys(str(one.run.keys / "clients.keys")).values()
        yield Running(one, address, key, folder, run / "recipes")
        one.process.send_signal(signal.SIGINT)
        one.process.wait(60)
