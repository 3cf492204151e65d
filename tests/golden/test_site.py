"""Checks the documentation site: it builds without warnings or internet access, and the build finds broken links."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make setup-docs"),
]


def build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(root / "made")]
    no_net = ["unshare", "-n", "--map-root-user"]
    has_namespaces = subprocess.run([*no_net, "true"], capture_output=True).returncode == 0
    return subprocess.run(
        [*(no_net if has_namespaces else []), *command], cwd=root, capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the files from which the site is built."""
    root = tmp_path / "tree"
    left_out = shutil.ignore_patterns("__pycache__", "models", "site-packages")
    for folder in ("docs", "proto", "shared", "services", "launch", "docker"):
        shutil.copytree(ROOT / folder, root / folder, ignore=left_out)
    for file in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "Makefile", ROOT / "LICENSE"]:
        shutil.copy(file, root)
    shutil.copytree(ROOT / "tests", root / "tests", ignore=left_out)
    return root


def test_site_has_every_document_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for document in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / f"{document.stem}.html").is_file()
    pages = list(tmp_path.rglob("*.html"))
    loaded = [
        found
        for page in pages
        for found in re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?://[^\"]+)", page.read_text())
    ]
    assert loaded == []
    # Diagrams are drawings, and the menu leads to every document.
    assert "mermaid" not in (tmp_path / "architecture.html").read_text()
    menu = (tmp_path / "index.html").read_text()
    names = {document.stem for document in (ROOT / "docs").glob("*.md")}
    assert {each for each in names if f'href="{each}.html"' not in menu} == set()
    assert (tmp_path / "search" / "search_index.json").is_file()


def test_broken_links_and_diagrams_without_a_drawing_fail_the_build(tree: Path) -> None:
    targets = ("no_such_page.md", "keys.md#no-such-heading", "../shared/no_such_file.py")
    links = "\n".join(f"[x]({target})\n" for target in targets)
    page = tree / "docs" / "glossary.md"
    page.write_text(f"{page.read_text()}\n{links}\n```mermaid\nflowchart TD\n  A --> B\n```\n")
    ended = build(tree)
    assert ended.returncode != 0
    warnings = [line for line in (ended.stdout + ended.stderr).splitlines() if "glossary" in line]
    for expected in (*targets, "has no drawing"):
        assert any(expected in line for line in warnings), warnings
