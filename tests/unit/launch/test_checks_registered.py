"""Tests that every check before a start is in the one list that a dry run and a start share."""

from __future__ import annotations

import inspect

from launch.checks import adapter, addresses, critic, distill, preflight, rewards, schedule, sources

HELPERS = {"_check_rows", "check_address", "_check_model_memory", "_check_tokenizer_of", "_check_folder"}
"""Functions that a check or `preflight.check` itself calls."""


def test_every_check_is_registered_once() -> None:
    named = {
        name
        for module in (adapter, addresses, critic, distill, preflight, rewards, schedule, sources)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name.startswith(("_check", "check_"))
    } - {"check_host"}
    registered = [check.__name__ for check in preflight.CHECKS]
    assert len(registered) == len(set(registered))
    assert named == {*registered, *HELPERS}
    assert set(preflight.MODEL_CHECKS) | set(preflight.HOST_CHECKS) <= set(preflight.CHECKS)
