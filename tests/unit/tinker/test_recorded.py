"""What the SDK 0.38 sends is understood, and the answers have the form that it expects. The requests were recorded by
`python -m tests.unit.tinker.record`."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.policy_trainer.tinker import application
from tests.unit.tinker.served import KEYS, Served, served

RECORDED = Path(__file__).parent / "recorded"
_ID = re.compile(rb"[0-9a-f]{32}")


@pytest.mark.parametrize("recipe", ["sl_loop", "rl_loop", "math_rl"])
def test_the_recorded_requests_of_a_recipe_are_answered_as_then(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "WAIT_S", 0.05)
    exchanges = json.loads((RECORDED / f"{recipe}.json").read_text())
    asyncio.run(_replay(exchanges, tmp_path, monkeypatch))


async def _replay(exchanges: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(folder / "server", monkeypatch) as one:
        ids: dict[bytes, bytes] = {}
        for exchange in exchanges:
            await _answered_alike(one, exchange, ids)
        assert one.stand.updates or not any(exchange["path"].endswith("optim_step") for exchange in exchanges)


async def _answered_alike(one: Served, exchange: dict[str, Any], ids: dict[bytes, bytes]) -> None:
    def renamed(data: bytes) -> bytes:
        return _ID.sub(lambda match: ids.get(match[0], match[0]), data)

    answer = await one.client.request(
        exchange["method"],
        renamed(exchange["path"].encode()).decode(),
        content=renamed(base64.b64decode(exchange["body"])),
        headers={"x-api-key": KEYS["one"]},
    )
    assert answer.status_code == exchange["status"], (exchange["path"], answer.text[:300])
    assert answer.headers.get("content-type", "") == exchange["type"], exchange["path"]
    if exchange["answer"] is None:
        return
    before, now = exchange["answer"], answer.json()
    assert before.keys() == now.keys(), (exchange["path"], now)
    if "session_id" in before:
        ids[before["session_id"].encode()] = now["session_id"].encode()
    same = {"request_id", "model_id", "path", "sampling_session_id", "sample_sequence_ids", "type", "metrics"}
    for name in before.keys() & same:
        assert json.loads(renamed(json.dumps(before[name]).encode())) == now[name], (exchange["path"], name)
