"""Writes docs/api.md, the API reference for users, from the docstrings: `python -m tests.golden.api_reference`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

from services.rollout.user_code import builtin
from shared import sample, workflow

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "api.md"
LINE_CHARS = 120
HEAD = """# API reference

The classes that your functions receive and return, and the functions named `builtin:<name>`.
[your_code.md](your_code.md) shows how they are used.
This page is written from the docstrings by `python -m tests.golden.api_reference`.

| your function | signature |
|---|---|
| `reward.function` | `(sample: Sample, **params) -> float` or `dict[str, float]`, or a coroutine function |
| `reward.function`, for a group | `(samples: list[Sample], **params) -> list[float]`, or a coroutine function |
| `workflow.function` | `async (row: dict, llm: LLM, ctx: Context, **params) -> Trajectory` |
| `algorithm.advantage.name` | `(rewards, groups, loss_tokens, **params) -> advantages`: \
numpy arrays [N], one value per sample |
| `algorithm.loss.name` | `(cur, anchor, tokens, **params) -> loss`: torch tensors [M], one value per token |
"""


def _source_link(module: ModuleType) -> str:
    path = Path(inspect.getsourcefile(module) or "").relative_to(ROOT)
    return f"[{path}](../{path})"


def _prose(doc: str | None) -> str:
    parts = inspect.cleandoc(doc or "").split("`")
    return "`".join(part if at % 2 else part.replace("<", "\\<") for at, part in enumerate(parts))


def _class(node: ast.ClassDef) -> str:
    """Return the section of a class: its docstring, its fields with their docstrings, and its public methods."""
    fields = []
    methods = []
    for at, each in enumerate(node.body):
        match each:
            case ast.AnnAssign():
                after = node.body[at + 1] if at + 1 < len(node.body) else None
                said = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    said = f": {_prose(str(after.value.value))}"
                fields.append(f"- `{ast.unparse(each)}`{said}")
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not each.name.startswith("_"):
                methods.append(_function(each, level=4))
            case _:
                pass
    parts = [f"### {node.name}\n", _prose(ast.get_docstring(node)) + "\n"]
    if fields:
        parts.append("\n".join(fields) + "\n")
    return "\n".join(parts + methods)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, level: int) -> str:
    bare = [each for each in node.decorator_list if isinstance(each, ast.Name) and each.id == "property"]
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = re.sub(r"(: [^=:]+?)=", r"\1 = ", ast.unparse(node.args))
    line = f"{prefix} {node.name}({arguments}){returns}: ..."
    if len(line) > LINE_CHARS:
        if len(arguments) + 4 > LINE_CHARS:
            arguments = re.sub(r", (?=\w+: )", ",\n    ", arguments) + ","
        line = f"{prefix} {node.name}(\n    {arguments}\n){returns}: ..."
    if bare:
        line = f"{node.name}{returns.replace(' ->', ':')}"
    said = _prose(ast.get_docstring(node))
    return f"{'#' * level} `{node.name}`\n\n```python\n{line}\n```\n{f'{chr(10)}{said}{chr(10)}' if said else ''}"


def _nodes(module: ModuleType) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(inspect.getsource(module))).body


def _row_field(needed: builtin.RowField) -> str:
    return f"Row field: `{needed.name}`, {' '.join(filter(None, (needed.holds, needed.condition)))}.\n"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, module in (("Samples", sample), ("Workflows", workflow)):
        parts.append(f"## {title}\n\n{_source_link(module)}: {_prose(module.__doc__)}\n")
        parts += [_class(node) for node in _nodes(module) if isinstance(node, ast.ClassDef)]
    named = {node.name: node for node in _nodes(builtin) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for title, functions in (("Built-in rewards", builtin.REWARDS), ("Built-in workflows", builtin.WORKFLOWS)):
        parts.append(f"## {title}\n\n{_source_link(builtin)}\n")
        for name, function in functions.items():
            parts.append(_function(named[name], level=3))
            parts += [_row_field(each) for each in function.fields]
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(page())
