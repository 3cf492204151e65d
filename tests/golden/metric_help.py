"""Writes services/exporter/names.json from docs/metrics.md and docs/telemetry.md: `python -m tests.golden.metric_help`.

Through this file, Prometheus gets the meanings and units that the documents state, even if the documents are not
installed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "services" / "exporter" / "names.json"
_CELL = re.compile(r"(?<!\\)\|")


def cells(file: str, header: str) -> list[list[str]]:
    """Return the rows of the table with this header in a document."""
    lines = (ROOT / "docs" / file).read_text().splitlines()
    found = []
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().replace("\\|", "|") for cell in _CELL.split(line)[1:-1]])
    return found


def text() -> str:
    """Return the content of the file."""
    metrics = [
        {"name": name.strip("`"), "unit": unit, "help": meaning.replace("`", "")}
        for name, unit, meaning in cells("metrics.md", "| name | unit | meaning |")
    ]
    topics = {
        name.strip("`"): about.replace("`", "")
        for names, _, about in cells("telemetry.md", "| topic | sent by | about |")
        for name in names.split(", ")
    }
    return json.dumps({"metrics": metrics, "topics": topics}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(text())
    print(DOCUMENT)
