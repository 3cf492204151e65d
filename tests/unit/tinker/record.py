"""Records what the SDK and the cookbook's recipes send, for test_recorded.py: `make setup-tinker`, then
`python -m tests.unit.tinker.record`. Run it after each new release of the SDK, and read the difference."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.guest_server import GuestServer
from tests.tinker_recipes import PYTHON, RECIPES, ROOT, prepare
from tests.unit.tinker.served import KEYS, served

RECORDED = Path(__file__).parent / "recorded"
LIMIT_S = 180
VOLATILE = ("/telemetry", "/session_heartbeat")
"""What is not kept, because it depends on the time that passes."""


class Recorder:
    """Passes requests on, and keeps them with their answers."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self.exchanges: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, answer, start = bytearray(), bytearray(), dict[str, Any]()

        async def received() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                answer.extend(message.get("body", b""))
            await send(message)

        await self._application(scope, received, sent)
        kind = dict(start["headers"]).get(b"content-type", b"").decode()
        self.exchanges.append(
            {
                "method": scope["method"],
                "path": scope["path"],
                "body": base64.b64encode(bytes(body)).decode(),
                "status": start["status"],
                "type": kind,
                "answer": json.loads(answer) if "json" in kind and answer else None,
            }
        )


async def record(recipe: str, folder: Path) -> list[dict[str, Any]]:
    """Run a recipe and return its exchanges."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with served(folder / "server", monkeypatch) as one:
            recorder = Recorder(one.app)
            http = GuestServer(recorder)
            await http.start()
            environment = {
                **os.environ,
                "TINKER_BASE_URL": f"http://{http.address}",
                "TINKER_API_KEY": KEYS["one"],
                "HF_HUB_OFFLINE": "1",
            }
            command = [str(PYTHON), "-m", *RECIPES[recipe], f"log_path={folder / 'log'}"]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL
            )
            status = await asyncio.wait_for(process.wait(), LIMIT_S)
            await http.stop()
            if status:
                sys.exit(f"{recipe}: exit status {status}")
            return [one for one in recorder.exchanges if not one["path"].endswith(VOLATILE)]


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    for recipe in RECIPES:
        folder = Path(tempfile.mkdtemp())
        try:
            prepare(folder)
            exchanges = asyncio.run(record(recipe, folder))
        finally:
            shutil.rmtree(folder)
        file = RECORDED / f"{recipe}.json"
        file.write_text(json.dumps(exchanges, indent=1) + "\n")
        print(f"{file.relative_to(ROOT)}: {len(exchanges)} requests, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
