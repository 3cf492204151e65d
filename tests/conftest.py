"""Configuration of all tests. It sets the hypothesis profiles, skips GPU tests without a GPU, and, in CI, fails any
other test that is skipped.

Fixtures of a single test folder do not belong here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import Phase, settings

# This is set before anything imports the hub's client, because no test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests send these signals to processes that they start, which would inherit them as ignored from `nohup` or `&`.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler)

# Wall-clock deadlines per example would fail on a busy machine.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
# Mutation tests need to know only that a defect is found, so examples are not minimised.
settings.register_profile("mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _fail_if_left_out(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_left_out(report)
    return report


def _fail_if_left_out(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fail a skipped test in CI. A test is skipped if the machine lacks something that the test needs, and CI must not
    lack anything."""
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"must not be skipped in CI: {report.longreprtext}"
