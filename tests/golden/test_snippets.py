"""Checks commands and snippets in documents: their modules, options, topology keys and code exist and can be parsed."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tests.golden import api_reference, topology_keys
from tests.golden.test_documents import DOCUMENTS, name

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("cluster", "ctl", "host", "monitor")
KEYS = {re.sub(r"\[\]", "", each) for each in re.findall(r"^\| `([^`]+)`", topology_keys.DOCUMENT.read_text(), re.M)}
FREE = ("params", "engine_args")
"""Last parts of the keys whose value is a mapping with arbitrary keys."""
SECTIONS = {key.partition(".")[0] for key in KEYS}
# Words that look like topology keys but are not, such as file names.
OTHER = re.compile(r"\.(py|md|yaml|jsonl|sqlite|json|log|txt|html|gz|csv|svg|h|c)$|^(run\.name|data\.copies)$")


def blocks(document: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of every fenced block."""
    for indent, language, text in FENCE.findall(document.read_text()):
        yield language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def command_lines(document: Path) -> list[list[str]]:
    """Return the words of each `python -m launch...` in the document, without comments."""
    found = []
    for _, text in blocks(document):
        for line in text.replace("\\\n", " ").splitlines():
            at = re.search(r"python -m launch\.(\w+)(.*)", line)
            if at and at[1] in COMMANDS:
                words = shlex.split(at[2].replace("[", " ").replace("]", " ").replace("…", ""), comments=True)
                ends = [n for n, word in enumerate(words) if word in (";", "&&", "|", ">", "2>&1")]
                found.append([at[1], *words[: ends[0] if ends else None]])
    return found


def is_key(path: str) -> bool:
    """Return whether the schema has a key, a section, or a pattern with `*` or `<name>`. A free-form mapping accepts
    any key."""
    pattern = re.escape(re.sub(r"<[^>]+>", "*", path)).replace(r"\*", "[^.]+")
    for key in KEYS:
        parts, named = key.split("."), path.split(".")
        # A part `<name>` of a key stands for any name.
        fits = all("<" in part or part == mine for part, mine in zip(parts, named, strict=False))
        if fits and (len(named) <= len(parts) or parts[-1] in FREE):
            return True
        if re.fullmatch(rf"{pattern}(\..*)?", key):
            return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_have_the_options_that_documents_give_them(document: Path) -> None:
    for module, *words in command_lines(document):
        command = typer.main.get_command(importlib.import_module(f"launch.{module}").app)
        commands = [command]
        if parts := getattr(command, "commands", {}):
            named = [word for word in words if word in parts]
            assert named or not words or "--help" in words, f"{name(document)}: launch.{module} has no {words}"
            commands += [parts[word] for word in named[:1]]
        known = {option for each in commands for parameter in each.params for option in parameter.opts} | {"--help"}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{name(document)}: launch.{module} {words[:1]} has no {given - known}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_topology_keys_that_documents_name_exist(document: Path) -> None:
    text = document.read_text()
    named = {key for key, _ in re.findall(r"--set \"?([\w.-]+)=(\S*)", text)} - {"a.b"}
    if name(document) not in ("docs/coming_from.md", "CHANGELOG.md"):
        named |= set(re.findall(r"`((?:\w[\w-]*\.)+[\w<>*-]+)(?::[^`]*)?`", text))
    named |= {
        key
        for row in re.findall(r"^\|[^|]+\|(.+)\|$", text, re.M)
        if document.name == "coming_from.md"
        for key in re.findall(r"`((?:\w[\w-]*\.)+[\w<>*-]+)(?::[^`]*)?`", row)
    }
    unknown = [key for key in named if key.partition(".")[0] in SECTIONS and not OTHER.search(key) and not is_key(key)]
    assert sorted(unknown) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_code_blocks_in_documents_can_be_parsed(document: Path) -> None:
    for language, text in blocks(document):
        match language:
            case "python":
                ast.parse(text)
            case "yaml":
                list(yaml.safe_load_all(text))
            case "json":
                json.loads(text)
            case "sh" | "bash":
                shlex.split(text, comments=True)
            case _:
                assert language in ("", "mermaid", "text"), f"{name(document)}: a block in {language!r} is not checked"


def keys_of(data: Any, path: str = "") -> Iterator[str]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from keys_of(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_keys_of_example_topologies_in_documents_exist(document: Path) -> None:
    for language, text in blocks(document):
        data = yaml.safe_load(text) if language == "yaml" and "apiVersion" not in text else None
        if isinstance(data, dict) and set(data) <= SECTIONS:
            assert [key for key in keys_of(data) if not is_key(key)] == []


def test_api_reference_is_written_from_the_docstrings() -> None:
    assert api_reference.DOCUMENT.read_text() == api_reference.page(), "run: python -m tests.golden.api_reference"
