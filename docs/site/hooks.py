"""Turns the documents, which are written to be read in the repository, into pages of the site (mkdocs.yml).

- The menu is the list of links in docs/index.md, grouped by its headings.
- Documents outside of docs/ (README, CONTRIBUTING, ...) become pages, and so does every file and folder of the code
  that a document links to. A link without a target is a warning, which `--strict` turns into an error.
- Mermaid diagrams are replaced by their drawings (draw.py).
- Pages get what the theme's scripts expect and would otherwise fail without.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DIAGRAMS = DOCS / "site" / "diagrams"
OUTSIDE = {
    ROOT / "README.md": "project/readme-page.md",
    ROOT / "CONTRIBUTING.md": "project/contributing.md",
    ROOT / "CHANGELOG.md": "project/changelog.md",
    ROOT / "SECURITY.md": "project/security.md",
    ROOT / "proto" / "SPEC.md": "project/spec.md",
}
DOCUMENTS = sorted([*DOCS.glob("*.md"), *OUTSIDE])
LANGUAGES = {".py": "python", ".yaml": "yaml", ".md": "markdown", ".sbatch": "bash", ".json": "json", ".toml": "toml"}
STYLE = "site/code.css"
# darkmode.js switches two style sheets of highlight.js, which mkdocs.yml turns off, and stops at the first that is
# missing. Browsers refuse to start the worker of the search for pages that are read from the disk.
EXPECTED = """<style id="hljs-light"></style><style id="hljs-dark"></style>
<script>if (location.protocol === "file:") window.Worker = class { postMessage() {} };</script>
</head>"""

_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_log = logging.getLogger("mkdocs.plugins.documents")


def diagrams(markdown: str) -> list[str]:
    """Return the texts of the mermaid diagrams."""
    return _MERMAID.findall(markdown)


def drawing(text: str) -> Path:
    """Return the path of a diagram's drawing."""
    return DIAGRAMS / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.svg"


def _links(document: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of every relative link in a document."""
    for target in _LINK.findall(document.read_text()):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield (Path(os.path.normpath(document.parent / file)) if file else document), anchor


def _page_of(path: Path) -> str:
    """Return the page, in mkdocs terms, for a file or folder in the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    place = path.relative_to(ROOT).as_posix()
    return f"code/{place}/index.md" if path.is_dir() else f"code/{place}.md"


def _code_page(path: Path) -> str:
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        names = [f"{each.name}/" if each.is_dir() else each.name for each in sorted(path.iterdir())]
        return title + "".join(f"- `{name}`\n" for name in names if not name.startswith((".", "__pycache__")))
    # This fence is longer than any in the file.
    fence = "`" * 8
    return f"{title}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n{fence}\n"


def _title(document: Path) -> str:
    found = re.search(r"^# (.+)$", document.read_text(), re.MULTILINE)
    return found[1].replace("`", "") if found else document.stem


def on_config(config: Any) -> Any:
    """Make the menu from docs/index.md."""
    menu: list[dict[str, Any]] = [{"Documents": "index.md"}]
    for section in re.split(r"^## ", (DOCS / "index.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        files = dict.fromkeys(os.path.normpath(DOCS / each.partition("#")[0]) for each in _LINK.findall(text))
        pages = [Path(each) for each in files if each.endswith(".md")]
        menu.append({heading: [{_title(page): _page_of(page)} for page in pages]})
    config["nav"] = menu
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the documents outside of docs/ and the code that documents link to."""
    for document, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=document.read_text()))
    linked = {path for document in DOCUMENTS for path, _ in _links(document)}
    for path in sorted(linked):
        if path.exists() and not path.is_relative_to(DOCS) and path not in OUTSIDE:
            files.append(File.generated(config, _page_of(path), content=_code_page(path)))
    light = HtmlFormatter(style="default").get_style_defs('[data-bs-theme="light"] .codehilite')
    dark = HtmlFormatter(style="monokai").get_style_defs('[data-bs-theme="dark"] .codehilite')
    files.append(File.generated(config, STYLE, content=f"{light}\n{dark}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to pages of the site, and replace diagrams with their drawings."""
    source = next((each for each, uri in OUTSIDE.items() if uri == page.file.src_uri), DOCS / page.file.src_uri)
    if page.file.src_uri.startswith("code/"):
        return markdown
    here = Path(page.file.src_uri).parent

    def relative(uri: str) -> str:
        return os.path.relpath(uri, here)

    def picture(found: re.Match[str]) -> str:
        path = drawing(found[1])
        if not path.exists():
            _log.warning("%s: a diagram has no drawing; run docs/site/draw.py", source)
        return f"![diagram]({relative(path.relative_to(DOCS).as_posix())})"

    def link(found: re.Match[str]) -> str:
        if "://" in found[1] or found[1].startswith("#"):
            return found[1]
        file, hash_sign, anchor = found[1].partition("#")
        path = Path(os.path.normpath(source.parent / file))
        if not path.exists():
            _log.warning("%s: links to %s, which does not exist", source, found[1])
            return found[1]
        return relative(_page_of(path)) + hash_sign + anchor

    return _MERMAID.sub(picture, _LINK.sub(link, markdown))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Add what the theme's scripts expect."""
    return output.replace("</head>", EXPECTED, 1)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Add the same to pages without a document, such as 404.html."""
    return output.replace("</head>", EXPECTED, 1)
