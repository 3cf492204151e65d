"""Starts vLLM's own server on the CPU for tests. It is a separate process, so the tests never import vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.rollout.vllm_case import REPOSITORY, TINY
from tests.integration.tiny.harness import free_port

START_S = 240
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def server(folder: Path, *options: str, **environment: str) -> Iterator[str]:
    """Start vLLM's server with the shipped model and yield its base URL once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--kv-cache-memory-bytes", "268435456"]
    command += ["--served-model-name", "tiny", *options]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT, **environment}, stdout=log, stderr=log
        )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
            assert time.monotonic() < until, (folder / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()  # noqa: S310
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
