"""Finds Python files, parses them, and resolves names within one file."""

from __future__ import annotations

import ast
import io
import math
import operator
import os
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Try: TypeAlias = ast.Try | ast.TryStar
Scope: TypeAlias = Function | ast.Lambda | ast.Module

#: Folders of code that is not the project's own. `files` skips virtual environments as well.
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
_IGNORE = re.compile(r"#\s*distlock:\s*ignore\[([\w\s,-]+)\]")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NO_LOCK = re.compile(r"^lock(out|down)|(b|c|un)lock(ed)?$")
_LOCK = re.compile(r"^lock|(lock|locked|mutex|semaphore)$|^(lease|running|busy|processing)$")
_MOST = 1e300
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Unreadable(Exception):
    """A file that cannot be read, or is no Python of this version."""


def files(
    paths: Iterable[Path],
    excluded: Sequence[str] = (),
    skip: Callable[[OSError], object] = lambda error: None,
) -> Iterator[Path]:
    """Yield named files and Python files below folders; `skip` gets the error of unread folders."""
    # Normalised, because the completion of a shell ends a folder with a slash.
    patterns = [str(Path(each)) for each in excluded]

    def is_left(path: Path) -> bool:
        return not any(fnmatch(text, e) for e in patterns for text in (str(path), path.name))

    for path in paths:
        if path.is_file():
            if is_left(path):
                yield path
            continue
        for root, folders, names in os.walk(path, onerror=skip):
            here = Path(root)
            if "pyvenv.cfg" in names and here != path:
                folders.clear()
                continue
            folders[:] = sorted(
                name
                for name in folders
                if is_left(here / name) and not name.startswith(".") and name not in _SKIPPED
            )
            yield from (here / n for n in sorted(names) if n.endswith(".py") and is_left(here / n))


def words(text: str) -> set[str]:
    """Return the words of identifiers and texts, in lower case."""
    return {word.lower() for word in _WORD.findall(text)}


def argument(call: ast.Call, name: str, place: int = 99) -> ast.expr | None:
    """Return an argument of a call, by its name or its position."""
    given = {each.arg: each.value for each in call.keywords}
    return given.get(name, call.args[place] if len(call.args) > place else None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Tell whether an expression is this constant."""
    return isinstance(node, ast.Constant) and repr(node.value) == repr(value)


class Source:
    """A parsed file."""

    def __init__(self, path: Path) -> None:
        try:
            if path.exists() and not path.is_file():
                raise Unreadable("no file")
            if path.suffix == ".ipynb":
                raise Unreadable("a notebook is JSON, not Python")
            raw = path.read_bytes()
            with warnings.catch_warnings(action="ignore"):
                self.tree = ast.parse(raw, str(path))
            text = raw.decode(tokenize.detect_encoding(io.BytesIO(raw).readline)[0])
        except SyntaxError as error:
            where = f"line {error.lineno}: " if error.lineno else ""
            raise Unreadable(where + error.msg) from error
        except (OSError, ValueError, LookupError, MemoryError, RecursionError) as error:
            raise Unreadable(str(error) or type(error).__name__) from error
        self.nodes = [*ast.walk(self.tree)]
        self.parents = {child: each for each in self.nodes for child in ast.iter_child_nodes(each)}
        self.calls = [each for each in self.nodes if isinstance(each, ast.Call)]
        self.ignored = {
            number: {name.strip() for name in found[1].split(",")}
            for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1)
            if (found := _IGNORE.search(line))
        }
        self._imports: dict[str, str] = {}
        self._assigned = defaultdict[tuple[ast.AST | None, str], list[ast.expr | None]](list)
        self._functions = {each.name: each for each in self.nodes if isinstance(each, Function)}
        for node in self.nodes:
            self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                of = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
                for each in names:
                    root = each.name.partition(".")[0]
                    self._imports[each.asname or root] = of + (each.name if each.asname else root)
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value)
            case ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
                self._bind(target, node.value)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, node.context_expr)
            case ast.AugAssign() | ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind(node.target, None)
            case ast.arg():
                self._assigned[self.scope(node), node.arg].append(None)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        match target:
            case ast.Name(id=name):
                block = self.parents[self.parents[target]]
                owner = block if isinstance(block, ast.ClassDef) else self.scope(target)
                self._assigned[owner, name].append(value)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                self._assigned[self.owner(target), name].append(value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for each in parts:
                    self._bind(each, None)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, innermost first."""
        while above := self.parents.get(node):
            yield above
            node = above

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, or the module, in which a node runs."""
        return next((each for each in self.above(node) if isinstance(each, Scope)), self.tree)

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class around a node."""
        return next((each for each in self.above(node) if isinstance(each, ast.ClassDef)), None)

    def inside(self, of: ast.AST | Sequence[ast.AST]) -> Iterator[ast.AST]:
        """Yield the nodes in a node or in lines, without the bodies of functions defined there."""
        waiting = [*ast.iter_child_nodes(of)] if isinstance(of, ast.AST) else [*of]
        while waiting:
            each = waiting.pop()
            yield each
            if not isinstance(each, Scope):
                waiting += ast.iter_child_nodes(each)

    def is_ignored(self, call: ast.Call) -> bool:
        """Tell whether the result of a call is never read."""
        parent = next(each for each in self.above(call) if not isinstance(each, ast.Await))
        if isinstance(parent, ast.Assign) and isinstance(name := parent.targets[0], ast.Name):
            said = [e for e in ast.walk(self.scope(call)) if isinstance(e, ast.Name)]
            return not any(e.id == name.id and isinstance(e.ctx, ast.Load) for e in said)
        return isinstance(parent, ast.Expr)

    def called(self, of: ast.AST | Sequence[ast.AST]) -> set[str]:
        """Return the names of the functions that a node, or lines, call."""
        return {self.name(e.func) for e in self.inside(of) if isinstance(e, ast.Call)}

    def own(self, call: ast.Call) -> Function | None:
        """Return the function that a call calls, if the same file defines it."""
        match call.func:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                return self._functions.get(name)
        return None

    def value(self, node: ast.expr, depth: int = 4) -> ast.expr:
        """Return the value of a name that is assigned once, or what is awaited; else the node."""
        found: list[ast.expr | None] = []
        match node:
            case ast.Await():
                found = [node.value]
            case ast.Name():
                scopes = (each for each in self.above(node) if isinstance(each, Scope))
                found = next((f for s in scopes if (f := self._assigned.get((s, node.id)))), [])
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                found = self._assigned.get((self.owner(node), node.attr), [])
        return self.value(found[0], depth - 1) if len(found) == 1 and found[0] and depth else node

    def behind(self, node: ast.expr) -> set[ast.expr]:
        """Return the values of all parts of an expression: see `value`."""
        return {self.value(each) for each in ast.walk(node) if isinstance(each, ast.expr)}

    def origin(self, node: ast.expr, depth: int = 40) -> str:
        """Return the dotted origin of an expression: `redis.Redis().pipeline()`."""
        node = self.value(node)
        match node:
            case ast.Name():
                return self._imports.get(node.id, node.id)
            case ast.Attribute() if depth:
                return f"{self.origin(node.value, depth - 1)}.{node.attr}"
            case ast.Call() if depth:
                return f"{self.origin(node.func, depth - 1)}()"
            case ast.Subscript() if depth:
                return f"{self.origin(node.value, depth - 1)}[]"
        return ""

    def name(self, node: ast.expr) -> str:
        """Return the last name in the origin of an expression, without calls."""
        return self.origin(node).rstrip("()[]").rpartition(".")[2]

    def number(self, node: ast.expr | None, depth: int = 6) -> float | None:
        """Return the seconds that an expression states: infinite for None, None if unclear."""
        node = self.value(node) if node and depth else None
        match node:
            case ast.Constant(value=int() | float() | None as number):
                # A larger integer does not fit into a float.
                return math.inf if number is None or number > _MOST else float(number)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                parts = [self.number(node.left, depth - 1), self.number(node.right, depth - 1)]
                return None if None in parts else _OPERATORS[type(node.op)](*parts)
        return None

    def is_lockish(self, node: ast.expr) -> bool:
        """Tell whether the words of an expression suggest a lock."""
        said = words(f"{ast.unparse(node)} {ast.unparse(self.value(node))}")
        return any(_LOCK.search(word) and not _NO_LOCK.search(word) for word in said)
