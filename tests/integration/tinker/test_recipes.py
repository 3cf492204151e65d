"""Unmodified recipes of the Tinker cookbook train on a real cluster, and an OpenAI client samples what they saved."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from shared.topology.serve import read_keys
from tests.integration.whole_cluster import Cluster, cluster
from tests.tinker_recipes import MODEL, PYTHON, RECIPES, ROOT, prepare

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="run make setup-tinker"),
]

SERVE = ROOT / "launch" / "topologies" / "recipes" / "serve.yaml"


@dataclass
class Running:
    """A cluster that serves, and a folder in which recipes find their data."""

    cluster: Cluster
    address: str
    key: str
    folder: Path

    def recipe(self, name: str, *arguments: str) -> list[dict[str, float]]:
        """Run a recipe and return the rows of its metrics."""
        log = self.folder / f"log-{name}"
        environment = {"TINKER_BASE_URL": f"http://{self.address}", "TINKER_API_KEY": self.key, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(PYTHON), "-m", *RECIPES[name], *arguments, f"log_path={log}"],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    prepare(folder, rows=24)
    with cluster(SERVE, folder, f"serve.listen={address}", limit_s=500) as one:
        one.wait_for("all are READY", lambda: one.pid("policy-trainer") and one.pid("rollout"))
        (key,) = read_keys(str(one.run.keys / "clients.keys")).values()
        yield Running(one, address, key, folder)
        one.process.send_signal(signal.SIGINT)
        one.process.wait(60)


def test_sl_loop_trains(running: Running) -> None:
    rows = running.recipe("sl_loop")
    assert len(rows) == 12
    assert rows[-1]["train_mean_nll"] < 0.7 * rows[0]["train_mean_nll"]


@pytest.mark.parametrize("name", ["rl_loop", "math_rl"])
def test_recipes_that_sample_finish(name: str, running: Running) -> None:
    rows = running.recipe(name)
    assert len(rows) >= 2
    differences = [abs(row[key]) for row in rows for key in row if key.startswith("optim/kl_sample_train")]
    assert name == "rl_loop" or differences
    assert all(difference < 1e-5 for difference in differences)


def test_an_openai_client_samples_the_base_and_what_was_saved(running: Running) -> None:
    client = openai.OpenAI(base_url=f"http://{running.address}/v1", api_key=running.key, max_retries=0)
    saved = [model.id for model in client.models.list()]
    assert saved[0] == MODEL
    sampler = next(name for name in saved if name.endswith("/sampler_weights/final"))
    for name in (MODEL, sampler):
        answer = client.completions.create(model=name, prompt="the cat", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 4
        assert answer.system_fingerprint == "base" or name == sampler
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tinker://nobody/sampler_weights/final", prompt="a", max_tokens=1)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"http://{running.address}/v1", api_key="tml-wrong", max_retries=0).models.list()
