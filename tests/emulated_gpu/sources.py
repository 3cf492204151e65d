"""Reads the sources of a package without importing it, for code that needs a GPU driver to be imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Unknown(LookupError):
    """A package has no such module, name or member. The message is one line."""


@dataclass(frozen=True)
class Definition:
    """A class, function or variable, and the module that defines it."""

    module: str
    node: ast.stmt

    @property
    def name(self) -> str:
        return f"{self.module}:{getattr(self.node, 'name', '?')}"


class Sources:
    """The packages in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cache  # noqa: B019  # one object per test session
    def tree(self, module: str) -> ast.Module:
        """Return the syntax tree of a module. Raises Unknown."""
        path = self._folder.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text())
        raise Unknown(f"there is no module {module}")

    def find(self, module: str, name: str) -> Definition:
        """Return what `from module import name` imports. Raises Unknown."""
        tree = self.tree(module)
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return Definition(module, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return Definition(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(_absolute(module, node, self._is_package(module)), alias.name)
        lazy = self._lazy(tree).get(name)
        if lazy is not None:
            relative, _, attribute = lazy.partition(":")
            return self.find(module + relative, attribute)
        try:
            return Definition(f"{module}.{name}", self.tree(f"{module}.{name}"))  # type: ignore[arg-type]
        except Unknown:
            raise Unknown(f"{module} has no {name}") from None

    def members(self, of: Definition) -> dict[str, Definition]:
        """Return the methods, the annotated and assigned names, and the attributes that methods set, of a class and its
        bases. A base that is defined outside the packages has none."""
        if not isinstance(of.node, ast.ClassDef):
            raise Unknown(f"{of.name} is not a class")
        found: dict[str, Definition] = {}
        for base in reversed(of.node.bases):
            root = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(root, ast.Name):
                try:
                    found |= self.members(self.find(of.module, root.id))
                except Unknown:
                    continue
        for node in of.node.body:
            if isinstance(node, Function):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Assign | ast.AnnAssign):
                        found |= {name: Definition(of.module, inner) for name in _attributes(inner)}
            if isinstance(node, ast.Assign | ast.AnnAssign):
                found |= {name: Definition(of.module, node) for name in _targets(node)}
        methods = [node for node in of.node.body if isinstance(node, Function | ast.ClassDef)]
        return found | {node.name: Definition(of.module, node) for node in methods}

    def _is_package(self, module: str) -> bool:
        return self._folder.joinpath(*module.split("."), "__init__.py").is_file()

    def _lazy(self, tree: ast.Module) -> dict[str, str]:
        """Return the names that a module imports when they are first used: `MODULE_ATTRS` in vllm/__init__.py."""
        for node in tree.body:
            if isinstance(node, ast.Assign) and "MODULE_ATTRS" in _targets(node):
                table: dict[str, str] = ast.literal_eval(node.value)
                return table
        return {}


def accepts(function: Definition, call: ast.Call, *, method: bool = True) -> str:
    """Return why `function` cannot be called as in `call`, or "" if it can. Starred arguments are not judged."""
    node = function.node
    if not isinstance(node, Function):
        return ""
    given = node.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    if method and not static:
        positional = positional[1:]
    plain = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    if len(plain) > len(positional) and given.vararg is None:
        return f"{function.name} takes {len(positional)} positional arguments, not {len(plain)}"
    allowed = {*positional[len(plain) :], *(argument.arg for argument in given.kwonlyargs)}
    wrong = [word.arg for word in call.keywords if word.arg is not None and word.arg not in allowed]
    if wrong and given.kwarg is None:
        return f"{function.name} has no argument {', '.join(wrong)}"
    required = positional[len(plain) : len(positional) - len(given.defaults)]
    required += [
        argument.arg for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
    ]
    named = {word.arg for word in call.keywords}
    starred = len(plain) < len(call.args) or None in named
    missing = [] if starred else [name for name in required if name not in named]
    return f"{function.name} needs {', '.join(missing)}" if missing else ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that may run when it is imported, those inside `if` and `try` included."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, inner, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _attributes(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    ]


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])
