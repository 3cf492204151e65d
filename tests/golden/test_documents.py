"""The documents: links lead somewhere, commands exist, and the README is short."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "proto" / "SPEC.md"])
README_WORDS = 1200


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of every relative link of a document."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield (document.parent / file if file else document), anchor


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_lead_to_a_file_and_a_heading(document: Path) -> None:
    for file, anchor in links(document):
        assert file.exists(), f"{name(document)} links to {file}"
        assert not anchor or anchor in anchors(file), f"{name(document)} links to {file}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_modules_and_make_targets_that_documents_name_exist(document: Path) -> None:
    text = document.read_text()
    modules = set(re.findall(r"python -m ((?:proto|shared|services|launch|tests)[\w.]*\w)", text))
    assert not {module for module in modules if importlib.util.find_spec(module) is None}
    targets = set(re.findall(r"^([\w-]+):.* ##", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.M)) <= targets


def test_index_names_every_document() -> None:
    index = ROOT / "docs" / "index.md"
    named = {file.resolve() for file, _ in links(index)}
    unnamed = [name(each) for each in DOCUMENTS if each.resolve() not in named]
    assert unnamed == ["docs/index.md"]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS
