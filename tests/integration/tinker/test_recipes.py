"""Unmodified recipes of the Tinker cookbook train on a real cluster, and an OpenAI client samples what they saved."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.integration.tinker.served_recipes import Running, serving_recipes
from tests.tinker_recipes import MODEL, PYTHON, prepare

SCORES = Path(__file__).with_name("sdk_scores.py")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="run make setup-tinker"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served")
    prepare(folder / "data", rows=24)
    with serving_recipes(folder / "cluster", folder / "data", limit_s=500) as one:
        yield one


def test_sl_loop_trains(running: Running) -> None:
    rows = running.recipe("sl_loop")
    assert len(rows) == 12
    assert rows[-1]["train_mean_nll"] < 0.7 * rows[0]["train_mean_nll"]


@pytest.mark.parametrize(("name", "reward"), [("rl_loop", "reward/total"), ("math_rl", "env/all/reward/total")])
def test_recipes_that_sample_take_real_updates(name: str, reward: str, running: Running) -> None:
    rows = running.recipe(name)
    assert len(rows) >= 6
    assert len({row[reward] for row in rows if reward in row}) > 1
    differences = [abs(row[key]) for row in rows for key in row if key.startswith("optim/kl_sample_train")]
    assert name == "rl_loop" or differences
    assert all(difference < 1e-5 for difference in differences)


def test_an_openai_client_samples_the_base_and_what_was_saved(running: Running) -> None:
    client = openai.OpenAI(base_url=f"http://{running.served.address}/v1", api_key=running.served.key, max_retries=0)
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
        openai.OpenAI(base_url=f"http://{running.served.address}/v1", api_key="tml-wrong", max_retries=0).models.list()


def test_the_sdk_gets_the_likeliest_tokens_and_the_log_probs_of_any_tokens(running: Running) -> None:
    environment = {
        "TINKER_BASE_URL": f"http://{running.served.address}",
        "TINKER_API_KEY": running.served.key,
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [str(PYTHON), str(SCORES), MODEL], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["likeliest_of_samples"] == 0.0
    assert found["sampled_among_likeliest"] <= 1e-5
    assert found["targets_and_prompt"] <= 1e-5
    assert found["targets_and_likeliest"] <= 1e-5
    assert found["sparse_and_dense"] == 0.0
