"""Tests the timeline that the page receives: a busy process is drawn and counted over the whole window."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from proto.messages import TopicRow
from services.web.application import application
from services.web.page import Page
from services.web.parts import MAX_PIECES

RATE = 30
WORK: dict[str, float | str] = {"what": "score", "seconds": 1 / RATE}
WAIT: dict[str, float | str] = {"what": "call", "seconds": 1 / RATE, "of": "policy-trainer/0"}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("seconds", [5, 60, 300])
def test_a_process_with_thirty_spans_per_second_fills_its_lane(
    tmp_path: Path, seconds: int, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, now = Page(tmp_path, operable=False), time.time()
    for number in range(400 * RATE, 0, -1):
        values = WORK if number % 2 else WAIT
        page.own.view.apply(
            TopicRow(service="reference", instance=0, topic="span", at=now - number / RATE, values=values)
        )
    monkeypatch.setattr("services.web.application.time", SimpleNamespace(time=lambda: now))
    if live:
        monkeypatch.setattr(page, "calls", object())
    client = TestClient(application(page, None, None), base_url="http://127.0.0.1")
    [lane] = client.get(f"/api/timeline?seconds={seconds}").json()["lanes"]
    assert lane["known_s"] == pytest.approx(seconds)
    assert lane["working_s"] == pytest.approx(seconds / 2, rel=0.2)
    assert lane["waits"] == [["call", "policy-trainer/0", pytest.approx(seconds / 2, rel=0.2)]]
    assert lane["spans"][0][0] == pytest.approx(-seconds, abs=0.1)
    assert sum(count for *_, count in lane["spans"]) == pytest.approx(seconds * RATE, rel=0.2)
    assert len(lane["spans"]) < MAX_PIECES
