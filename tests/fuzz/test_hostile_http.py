"""Strangers open connections to the HTTP servers of a run and keep them. Everybody else is still served."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from services.web.service import MAX_CONNECTIONS
from tests.integration.tiny.harness import ROOT, environment
from tests.integration.web.shown_run import ended_run, page_of, row

FEW_DESCRIPTORS = 256
ENDPOINT = """
import asyncio
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint

async def main():
    endpoint = OpenAIEndpoint("tiny")
    await endpoint.start()
    print(endpoint.open(object()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def strangers(address: str, count: int) -> Iterator[None]:
    """Open connections that send one byte and nothing more."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), 10))
            with contextlib.suppress(ConnectionError):  # it has already lost its place
                stranger.send(b"G")
        yield


def status_of(address: str, path: str, **headers: str) -> int:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


def test_idle_connections_do_not_lock_visitors_out_of_the_page_or_end_their_streams(tmp_path: Path) -> None:
    run = ended_run(tmp_path / "shown", steps=3)
    with page_of(run) as url:
        address, token = urlsplit(url).netloc, url.partition("#token=")[2]
        bearer = {"Authorization": f"Bearer {token}"}
        with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as follower:
            follower.request("GET", "/api/stream", headers=bearer)
            stream = follower.getresponse()
            with strangers(address, MAX_CONNECTIONS + 50):
                assert status_of(address, "/") == 200
                assert status_of(address, "/api/metrics?name=reward%2Fmean", **bearer) == 200
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(f"{json.dumps(row(4))}\n")
                line = b""
                while b'"last":[0,4' not in line:
                    line = stream.readline()
                    assert line, "the stream has ended"


def test_a_rollout_keeps_descriptors_however_many_strangers_connect_to_the_endpoint_of_agents() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDPOINT],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS)),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().strip())
        with strangers(url.netloc, 2 * FEW_DESCRIPTORS):
            assert status_of(url.netloc, f"{url.path}/models") == 200
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < FEW_DESCRIPTORS // 2
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=10)
