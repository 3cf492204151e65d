"""Tests that the commands which errors, recipes and documents tell people to run exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from typer.models import CommandInfo

from launch import ctl

ROOT = Path(__file__).parents[2]
_MAKE = re.compile(r"`make ([a-z][a-z-]*[a-z])[^`\n{]*`")
_MODULE = re.compile(r"python -m ((?:launch|services|shared|tests)[a-z0-9_.]*[a-z0-9_])")
_CTL = re.compile(r"(?<![a-z])ctl(?: --run [^ `]+| --access [^ `]+| --json)* ([a-z][a-z-]+)")
_INSTALLS = re.compile(r"rlbus\[\w+\]")


def texts() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every tracked file that tells people what to run."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        if name.startswith(("proto/", "shared/", "services/", "launch/", "docs/", "README", "CONTRIBUTING")):
            try:
                yield name, (ROOT / name).read_text()
            except UnicodeDecodeError:
                continue


def named(pattern: re.Pattern[str]) -> dict[str, str]:
    """Return what `pattern` captures, with a file in which it stands."""
    return {match: name for name, text in texts() for match in pattern.findall(text)}


def test_named_make_targets_exist() -> None:
    targets = named(_MAKE)
    assert {"setup-rewards", "setup-ray", "setup-trackers"} <= targets.keys()
    phony = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target: name for target, name in targets.items() if target not in phony} == {}


def test_named_modules_can_be_run() -> None:
    modules = named(_MODULE)
    assert {"launch.cluster", "launch.ctl"} <= modules.keys()
    assert {module: name for module, name in modules.items() if not can_be_run(module)} == {}


def test_named_commands_of_ctl_exist() -> None:
    commands = named(_CTL)
    assert {"status", "restart", "export-access"} <= commands.keys()
    existing = {command.name or callback_name(command) for command in ctl.app.registered_commands}
    assert {command: name for command, name in commands.items() if command not in existing} == {}


def callback_name(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.callback.__name__.replace("_", "-")


def can_be_run(module: str) -> bool:
    file = ROOT / Path(*module.split("."))
    program = file.with_suffix(".py")
    return (file / "__main__.py").is_file() or (program.is_file() and "__main__" in program.read_text())


def test_no_text_names_a_package_that_no_index_has() -> None:
    assert named(_INSTALLS) == {}
