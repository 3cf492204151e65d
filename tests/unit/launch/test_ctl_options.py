"""Tests that the options of `launch.ctl` may stand before or after the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch import ctl


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["status", "--run", "d"], ["--run", "d", "status"]),
        (["--run", "d", "status"], ["--run", "d", "status"]),
        (["restart", "rollout/1", "--run=d", "--json"], ["--run=d", "restart", "rollout/1", "--json"]),
        (["logs", "rollout", "--access", "f", "-f"], ["--access", "f", "logs", "rollout", "-f"]),
        (["plot", "a", "--", "--run"], ["plot", "a", "--", "--run"]),
        (["status", "--run"], ["--run", "status"]),
    ],
)
def test_options_of_the_program_are_read_wherever_they_stand(given: list[str], wanted: list[str]) -> None:
    assert ctl.in_front(given) == wanted


@pytest.mark.parametrize("order", [["status", "--run"], ["--run"]])
def test_a_run_that_is_missing_is_named_in_both_orders(tmp_path: Path, order: list[str]) -> None:
    missing = tmp_path / "none"
    arguments = [*order, str(missing)] if order[0] == "status" else [*order, str(missing), "status"]
    done = CliRunner().invoke(ctl.app, arguments)
    assert done.exit_code == 2
    assert f"run directory {missing}: not a run" in done.output
