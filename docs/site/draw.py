"""Draws the mermaid diagrams of the documents into docs/site/diagrams/, so that the site needs neither scripts nor a
network.

    npm pack @mermaid-js/tiny@11.17.2 && tar xzf mermaid-js-tiny-11.17.2.tgz
    python docs/site/draw.py package/dist/mermaid.tiny.js

The script needs Chromium. A drawing is named after the digest of its text, and drawings that no document uses are
deleted.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from hooks import DIAGRAMS, DOCUMENTS, diagrams, drawing

PAGE = """<!doctype html><meta charset="utf-8"><pre class="mermaid">{text}</pre><script src="{script}"></script>
<script>mermaid.initialize({{startOnLoad: true, theme: "neutral", fontFamily: "sans-serif",
flowchart: {{htmlLabels: false}}, sequence: {{useMaxWidth: true}}}});</script>"""


def draw(text: str, script: Path) -> str:
    """Return the SVG of a diagram."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE.format(text=html.escape(text), script=script.absolute().as_uri()))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        ended = subprocess.run(
            ["/usr/bin/chromium", *options, page.as_uri()], capture_output=True, text=True, check=True, timeout=120
        )
    found = re.search(r"<svg.*</svg>", ended.stdout, re.DOTALL)
    if found is None:
        raise SystemExit(f"no drawing of: {text[:60]!r}")
    # Chromium's output is HTML, but an SVG file must be XML.
    return re.sub(r"<(br|hr)>", r"<\1/>", found[0]).replace("&nbsp;", " ")


def main() -> None:
    script = Path(sys.argv[1])
    texts = {text for document in DOCUMENTS for text in diagrams(document.read_text())}
    DIAGRAMS.mkdir(exist_ok=True)
    for old in set(DIAGRAMS.glob("*.svg")) - {drawing(text) for text in texts}:
        old.unlink()
    for text in texts:
        if not drawing(text).exists():
            drawing(text).write_text(draw(text, script))


if __name__ == "__main__":
    main()
