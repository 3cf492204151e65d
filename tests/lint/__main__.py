"""Checks two rules that neither ruff nor import-linter has: no circle of imports, and every class name exists once.

`python -m tests.lint` prints a line for each problem; the exit status is then 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lint import class_names, import_circles

PRODUCT = ("proto", "shared", "services", "launch")


def main() -> None:
    files = [file for package in PRODUCT for file in Path(package).rglob("*.py")]
    problems = [*import_circles.problems(PRODUCT), *class_names.problems(files)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(files)} files: no import circle, no class name twice")


if __name__ == "__main__":
    main()
