import itertools
from pathlib import Path

import pytest

from tests.lint import class_names, import_circles

_names = itertools.count()

CIRCLE_UNDER_TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {package}.a\n"
CIRCLE_INSIDE_A_FUNCTION = "def f():\n    import {package}.a\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with a name of its own, because Python remembers packages."""
    folder = tmp_path / f"linted_{next(_names)}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize("import_of_a", [CIRCLE_UNDER_TYPE_CHECKING, CIRCLE_INSIDE_A_FUNCTION])
def test_an_import_circle_is_found(package: Path, import_of_a: str) -> None:
    name = package.name
    (package / "a.py").write_text(f"import {name}.b\n")
    (package / "b.py").write_text(f"import {name}.c\n")
    (package / "c.py").write_text(import_of_a.format(package=name))
    (package / "d.py").write_text(f"import {name}.a\n")
    assert import_circles.import_circles([name]) == [[f"{name}.a", f"{name}.b", f"{name}.c"]]
    (problem,) = import_circles.problems([name])
    assert problem.startswith(f"import circle of 3 modules: {name}.a, {name}.b, {name}.c;")


def test_imports_in_one_direction_are_no_circle(package: Path) -> None:
    name = package.name
    (package / "a.py").write_text(f"import {name}.b\nimport {name}.c\n")
    (package / "b.py").write_text(f"import {name}.c\n")
    (package / "c.py").touch()
    assert import_circles.problems([name]) == []


def test_a_class_name_that_exists_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Row: ...\n")
    (tmp_path / "b.py").write_text("\nclass Table:\n    class Row: ...\n")
    (problem,) = class_names.problems(tmp_path.iterdir())
    assert problem.startswith(f"class Row is defined 2 times: {tmp_path}/a.py:1, {tmp_path}/b.py:3;")
