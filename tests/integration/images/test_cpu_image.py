"""Tests that the CPU image runs the quickstart as its own user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.images.built_image import Image, built_image, container

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

USER = 1000
LIMIT_S = 300.0
STEPS = 10


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with built_image(tmp_path_factory.mktemp("image")) as built:
        yield built


def test_the_image_runs_the_quickstart(image: Image, tmp_path: Path) -> None:
    runs, given = tmp_path / "runs", image.configuration()
    runs.mkdir()
    os.chown(runs, USER, USER)
    sets = [f"--set=run.steps={STEPS}"]
    with container(image, "alone", {"/app/runs": runs}, "2g") as alone:
        run = alone.run(*given["Entrypoint"], *given["Cmd"], *sets)
        try:
            output, _ = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
            run.wait()
    assert run.returncode == 0, output
    [path] = runs.iterdir()
    assert len((path / "metrics.jsonl").read_text().splitlines()) == STEPS + 1
    assert list((path / "export").glob("*.safetensors"))
    assert path.stat().st_uid == USER
