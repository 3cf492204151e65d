"""Checks the documents: links have existing targets, commands exist, and the README is short."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden import topology_keys

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "proto" / "SPEC.md"])
README_WORDS = 1200
PRODUCT = ("services", "shared")
PATHS = "scheduler|weights|cluster|monitor"
"""Possible first parts of a topic that consists of several parts."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of every relative link in a document."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield (document.parent / file if file else document), anchor


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub generates for a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_lead_to_a_file_and_a_heading(document: Path) -> None:
    for file, anchor in links(document):
        assert file.exists(), f"{name(document)} links to {file}"
        assert not anchor or anchor in anchors(file), f"{name(document)} links to {file}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_modules_and_make_targets_named_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    modules = set(re.findall(r"python -m ((?:proto|shared|services|launch|tests)[\w.]*\w)", text))
    assert not {module for module in modules if importlib.util.find_spec(module) is None}
    targets = set(re.findall(r"^([\w-]+):.* ##", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.M)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_named_in_documents_exist(document: Path) -> None:
    paths = re.findall(r"`((?:proto|shared|services|launch|tests|docs)/[\w./-]+)`", document.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_index_names_every_document() -> None:
    index = ROOT / "docs" / "index.md"
    named = {file.resolve() for file, _ in links(index)}
    unnamed = [name(each) for each in DOCUMENTS if each.resolve() not in named]
    assert unnamed == ["docs/index.md"]


def test_list_of_topology_keys_is_generated_from_the_schema() -> None:
    assert topology_keys.DOCUMENT.read_text() == topology_keys.page(), "run: python -m tests.golden.topology_keys"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_documented_telemetry_topics_are_exactly_those_that_exist() -> None:
    table = (ROOT / "docs" / "telemetry.md").read_text()
    documented = {each for row in re.findall(r"^\| (`.+?) \|", table, re.M) for each in re.findall("`([^`<]+)`", row)}
    code = "\n".join(path.read_text() for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    emitted = set(re.findall(rf"""emit\(\s*"([^"]+)"|"((?:{PATHS})/[a-z_]+)\"""", code))
    assert {first or second for first, second in emitted} <= documented
    assert {topic for topic in documented if f'"{topic}"' not in code} == set()
