"""Unmodified recipes of the Tinker cookbook, run against a real cluster that serves. Asserts only that a recipe ends
well."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.tinker.served import Served, serving
from tests.integration.whole_cluster import Cluster
from tests.tinker_recipes import MODEL, PYTHON, RECIPES

LIMIT_S = 240
"""Maximum seconds that a recipe may take."""


@dataclass
class Running:
    """A cluster that serves, and the folder in which recipes find their model and data (`tests.tinker_recipes`)."""

    served: Served
    folder: Path
    log: Path

    @property
    def cluster(self) -> Cluster:
        return self.served.cluster

    def recipe(self, name: str, *arguments: str, watch: Callable[[int], None] | None = None) -> list[dict[str, float]]:
        """Run a recipe and return the rows of its metrics. `watch` is called with the number of each new row."""
        log = self.log / name
        client = {"TINKER_BASE_URL": f"http://{self.served.address}", "TINKER_API_KEY": self.served.key}
        self.log.mkdir(parents=True, exist_ok=True)
        with (self.log / f"{name}.err").open("w+") as errors:
            recipe = subprocess.Popen(
                [str(PYTHON), "-m", *RECIPES[name], *arguments, f"log_path={log}"],
                cwd=self.folder,
                env={**os.environ, **client, "HF_HUB_OFFLINE": "1"},
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
def serving_recipes(run: Path, folder: Path, *overrides: str, limit_s: float) -> Iterator[Running]:
    """Serve in `run`, with recipes that read `folder`; interrupt the cluster at the end."""
    run.mkdir(parents=True, exist_ok=True)
    with serving(run, f"policy.model={folder / MODEL}", *overrides, limit_s=limit_s) as served:
        yield Running(served, folder, run / "recipes")
