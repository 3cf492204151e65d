"""Checks commands and snippets in documents: their modules, options, topology keys and code exist and can be parsed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from shared.topology import load
from shared.topology.document import read
from tests.golden import api_reference, topology_keys
from tests.golden.test_documents import DOCUMENTS, ROOT, name
from tests.unit.shared.topology.small_topology import BASE, make

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
SET = re.compile(r"""--set (?:"([^"]+)"|'([^']+)'|([^\s`"]+))""")
KEYS = {re.sub(r"\[\]", "", each) for each in re.findall(r"^\| `([^`]+)`", topology_keys.DOCUMENT.read_text(), re.M)}
KEYS |= {f"services.{key}" for key in KEYS if key.startswith("monitor.")}  # the long form
FOREIGN = ("apiVersion:", "scrape_configs:")
"""Beginnings of YAML blocks that are for other programs."""
FREE = ("params", "engine_args")
"""Last parts of the keys whose value is a mapping with arbitrary keys."""
SECTIONS = {key.partition(".")[0] for key in KEYS}
# Words that look like topology keys but are not, such as file names.
OTHER = re.compile(
    r"\.(py|md|yaml|jsonl|sqlite|json|log|txt|html|gz|csv|svg|h|c)$|^(run\.name|data\.copies|reward_model\.ground_truth)$"
)


def blocks(document: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of every fenced block."""
    for indent, language, text in FENCE.findall(document.read_text()):
        yield language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def lines(document: Path) -> Iterator[str]:
    """Yield each line of every fenced block, and each code span of the other text."""
    for _, text in blocks(document):
        yield from text.replace("\\\n", " ").splitlines()
    for span in SPAN.findall(FENCE.sub("", document.read_text())):
        yield " ".join(span.split())


def command_lines(document: Path) -> list[list[str]]:
    """Return the module and the words of each `python -m MODULE ...` and `ctl ...` in the document."""
    found = []
    for line in lines(document):
        whole = re.sub("^ctl ", "python -m launch.ctl ", line)
        at = re.search(r"python -m ((?:launch|services|tests)\.[\w.]*\w)(.*)", whole)
        if at:
            words = shlex.split(re.sub(r"[\[\]`]", " ", at[2]).replace("…", ""), comments=True)
            ends = [n for n, word in enumerate(words) if word in (";", "&&", "|", ">", "2>&1")]
            found.append([at[1], *words[: ends[0] if ends else None]])
    return found


def options_of(module: str, words: list[str], where: str) -> set[str]:
    """Return the options of a command. For a module without typer, return all options in its source code."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    main = Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
    source = main.read_text()
    if not re.search(r"^app = typer", source, re.M):
        source += (ROOT / "shared" / "actor" / "process.py").read_text() if "run_process" in source else ""
        source += main.with_name("make_tiny_qwen3.py").read_text() if "import VOCAB_SIZE, run" in source else ""
        return set(re.findall(r'"(--?[a-z][\w-]*)"', source))
    commands = [typer.main.get_command(importlib.import_module(module).app)]
    if parts := getattr(commands[0], "commands", {}):
        named = [word for word in words if word in parts]
        assert named or not words or "--help" in words, f"{where}: {module} has no {words}"
        commands += [parts[word] for word in named[:1]]
    return {option for each in commands for parameter in each.params for option in parameter.opts}


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
        known = options_of(module, words, name(document)) | {"--help"}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{name(document)}: {module} {words[:1]} has no {given - known}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_topology_keys_that_documents_name_exist(document: Path) -> None:
    text = document.read_text()
    named = {key for key, _ in re.findall(r"--set \"?([\w.-]+)=(\S*)", text)}
    if name(document) not in ("docs/coming_from.md", "CHANGELOG.md"):
        named |= set(re.findall(r"`((?:\w[\w-]*\.)+[\w<>*-]+)(?::[^`]*)?`", text))
    # The first column holds the keys of another system, unless its heading says that they are ours.
    ours_first = re.compile(r"^\| rlbus \|(?:.*\|\n)+", re.M)
    theirs_first = re.findall(r"^\|[^|]+\|(.+)\|$", ours_first.sub("", text), re.M)
    ours = [row for table in ours_first.findall(text) for row in re.findall(r"^\|([^|]+)\|", table, re.M)]
    named |= {
        key
        for row in [*theirs_first, *ours]
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


def merged(below: Any, above: Any) -> Any:
    """Return `below` with the values of `above`, which replace other values than mappings. Several sources or functions
    replace a single one."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    for several, single in (("sources", "source"), ("functions", "function")):
        if several in above:
            below = {key: value for key, value in below.items() if key != single}
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def small_topology(folder: Path) -> Path:
    """Write a topology, and the files that it names, into `folder`. Examples change parts of this topology."""
    path = make(folder) / "t.yaml"
    path.write_text(BASE.replace("held:", "heldout:").replace("instances: 2", "instances: 1"))
    return path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_example_topologies_in_documents_are_valid(document: Path, tmp_path: Path) -> None:
    path, example = small_topology(tmp_path), tmp_path / "example.yaml"
    whole = read(path).data
    whole["services"]["batch-store"]["memory"] = "16MiB"  # texts for a reward model need room
    for language, text in blocks(document):
        if language == "yaml" and not text.startswith(FOREIGN):
            example.write_text(text)
            given = read(example).data
            complete = {"run", "policy", "data", "algorithm", "optimizer"} <= given.keys() or "serve" in given
            path.write_text(json.dumps(given if complete else merged(whole, given)))  # JSON is YAML
            load(path, check_files=False)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_overrides_in_documents_are_valid(document: Path, tmp_path: Path) -> None:
    path = small_topology(tmp_path)
    for line in lines(document):
        overrides = ["".join(found) for found in SET.findall(line)]
        if overrides:
            load(path, overrides, check_files=False)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_values_that_documents_give_to_topology_keys_are_valid(document: Path, tmp_path: Path) -> None:
    path = small_topology(tmp_path)
    hosts = ["placement={engine: ray, hosts: {b: {}}}", "services.rollout.host=b", "transport.listen=10.0.0.1"]
    for key, value in re.findall(r"`((?:[\w-]+\.)+[\w-]+): ([^`]+)`", FENCE.sub("", document.read_text())):
        shortened = "…" in value or value.startswith("...")
        if is_key(key) and not shortened and document.name not in ("coming_from.md", "CHANGELOG.md"):
            load(path, [*hosts, f"{key}={' '.join(value.split())}"], check_files=False)


def test_api_reference_is_written_from_the_docstrings() -> None:
    assert api_reference.DOCUMENT.read_text() == api_reference.page(), "run: python -m tests.golden.api_reference"
