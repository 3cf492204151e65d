"""How much a server's clients lose against a training run and against an engine in one process.

    python -m tests.bench.bench_serve            # needs make setup-tinker

Both sides train an adapter on the same number of rows and tokens, on the same model and workers: the Tinker SDK through
the server, and a run of supervised training with its own driver, whose rows lie in a file. Then both sides sample: the
SDK through the server, and an engine in this process. At last a second client of the server sends a small request while
the first one has eight of 1,024 datums in its queue. `fairness` is how long the small one takes at most, relative to
one turn of the other client and twice what it takes alone. The output is a JSON object with all ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx2

from services.policy_trainer.tinker.state import QUANTUM_TOKENS
from services.rollout.engine import Prompt, SamplingParams
from services.rollout.engines.transformers_engine import TransformersEngine
from shared.model.adapter import AdapterStart
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST
from tests.bench.cluster_run import ROOT, BenchError, failed, running
from tests.bench.random_model import save_random

PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
CLIENT = ROOT / "tests" / "bench" / "peers" / "tinker_client.py"
NAME = "Qwen/Qwen3-8B-Base"
RANK = 32
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 128
KEYS = {name: f"tml-{secrets.token_hex(24)}" for name in ("large", "small")}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows of an update")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=500.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as name:
        folder = Path(name)
        save_random(
            folder / "model",
            hidden_size=asked.hidden,
            intermediate_size=3 * asked.hidden,
            num_hidden_layers=asked.layers,
            max_position_embeddings=1024,
        )
        try:
            client = through_server(asked, folder)
            driver_s = own_driver(asked, folder)
        except (BenchError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return 1
        engine = asyncio.run(own_engine(folder / "model"))
    sdk = max(client["sampled_per_s"])
    print(
        json.dumps(
            {
                "update_sdk_s": round(client["update_s"], 3),
                "update_driver_s": round(driver_s, 3),
                "training": round(driver_s / client["update_s"], 3),
                "sampled_sdk_per_s": round(sdk),
                "sampled_engine_per_s": round(max(engine)),
                "sampling": round(sdk / max(engine), 3),
                "small_s": round(client["small_s"], 3),
                "turn_s": round(client["turn_s"], 3),
                "delayed_s": [round(each, 3) for each in client["delayed_s"]],
                "fairness": round(max(client["delayed_s"]) / (client["turn_s"] + 2 * client["small_s"]), 3),
                "load": os.getloadavg()[0],
            }
        )
    )
    return 0


def through_server(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what the SDK's process measured."""
    topology, run, output = folder / "serve.yaml", folder / "served", folder / "serve.out"
    keys = folder / "clients.keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    topology.write_text(
        json.dumps(
            {
                "run": {"name": "serve"},
                "policy": {"model": str(folder / "model")},
                "serve": {
                    "models": {NAME: "policy"},
                    "listen": "127.0.0.1:8797",
                    "max_rank": RANK,
                    "max_models": 2,
                    "keys": str(keys),
                },
            }
        )
    )
    command = [sys.executable, "-m", "launch.cluster", str(topology), "--run-dir", str(run)]
    numbers = (RANK, asked.rows, asked.tokens, asked.updates, PROMPTS, SAMPLES, NEW_TOKENS, QUANTUM_TOKENS)
    with running(command, output) as server:
        until = time.monotonic() + asked.limit_s
        while not answers("http://127.0.0.1:8797/api/v1/healthz"):
            if server.poll() is not None or time.monotonic() > until:
                raise failed("the server did not start", output)
            time.sleep(0.2)
        done = subprocess.run(
            [str(PYTHON), str(CLIENT), NAME, *map(str, numbers)],
            env={
                **os.environ,
                "TINKER_BASE_URL": "http://127.0.0.1:8797",
                "TINKER_API_KEY": KEYS["large"],
                "OTHER_API_KEY": KEYS["small"],
                "HF_HUB_OFFLINE": "1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=asked.limit_s,
            check=False,
        )
        server.send_signal(signal.SIGINT)
        server.wait(60)
    if done.returncode:
        raise BenchError(f"the SDK's process ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["still_queued"]:
        raise BenchError("the first client's queue was empty before the second one's small requests were done")
    return found


def answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def own_driver(asked: argparse.Namespace, folder: Path) -> float:
    """Return the median seconds of a step of a training run with as many rows and tokens."""
    drawn, rows = random.Random(0), folder / "rows.jsonl"
    with rows.open("w") as file:
        for _ in range(2 * asked.rows):
            text = "".join(drawn.choices(LETTERS, k=asked.tokens - 2))  # one token each, and the end token
            file.write(json.dumps({"prompt": text[0], "answer": text[1:] + "a"}) + "\n")
    topology, output = folder / "train.yaml", folder / "train.out"
    topology.write_text(
        json.dumps(
            {
                "run": {"name": "driver", "steps": asked.updates + 3},
                "policy": {"model": str(folder / "model"), "lora": {"rank": RANK, "export_merged": False}},
                "data": {"train": {"source": f"jsonl:{rows}"}},
                "sampling": {"max_new_tokens": asked.tokens},
                "algorithm": {
                    "tasks_per_step": asked.rows,
                    "group_size": 1,
                    "loss": {"name": "cross_entropy", "aggregation": "token_mean"},
                },
                "optimizer": {"lr": 1e-4},
            }
        )
    )
    run = folder / "trained"
    command = [sys.executable, "-m", "launch.cluster", str(topology), "--run-dir", str(run)]
    with running(command, output) as process:
        if process.wait(asked.limit_s):
            raise failed("the training run failed", output)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median(row["time/step"] for row in steps if row["step"] > 2))


async def own_engine(model: Path) -> list[float]:
    """Return the tokens per second that an engine samples in this process, in several rounds."""
    start = AdapterStart(Lora(rank=RANK, alpha=float(RANK)), 1)
    engine = TransformersEngine(
        model=model,
        dtype="float32",
        threads=len(os.sched_getaffinity(0)),
        deterministic=False,
        passes=FASTEST,
        adapter=start,
        live=3,
    )
    await engine.start()
    await engine.set_weights(await engine.base_weights())
    drawn, rates = random.Random(0), []
    prompts = [[drawn.randrange(4, 60) for _ in range(32)] for _ in range(PROMPTS)]
    for seed in range(4):
        params = SamplingParams(
            samples=SAMPLES, temperature=1.0, max_new_tokens=NEW_TOKENS, seed=seed, ends=True, swaps=engine.swaps
        )
        began = time.perf_counter()
        calls = [engine.generate([Prompt("", prompt)], params, threading.Event()) for prompt in prompts]
        made = await asyncio.gather(*calls)
        count = sum(len(one.token_ids) for (group,) in made for one in group)
        rates.append(count / (time.perf_counter() - began))
    await engine.stop()
    return rates[1:]


if __name__ == "__main__":
    sys.exit(main())
