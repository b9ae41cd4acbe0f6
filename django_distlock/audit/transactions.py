"""Finds row locks outside transactions, messages before commits, session locks behind poolers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .regions import Regions, atomic
from .rules import REQUEST, Found
from .sources import Function, Source, argument
from .stores import WITHIN

_ROWS = "select-for-update-outside-atomic"
_SENDS = {"delay", "apply_async", "send_task", "enqueue", "aenqueue", "send_with_options"}
_LOCKS = {"distlock_all", "transaction_locked", "locked_task"}
_QUERIES = re.compile(
    "a?(get|first|last|earliest|latest|exists|count|aggregate|in_bulk|update|delete|iterator"
    "|(get|update)_or_create)"
)
_TAKING = {"list", "get_object_or_404", "get_list_or_404"}
_TASKS = {"shared_task", "task", "periodic_task", "locked_task", "actor", "job", "db_task"}
_METHODS = {"get", "post", "put", "patch", "delete", "create", "update", "destroy", "retrieve"}
_SESSION_LOCK = re.compile(r"\bpg_(try_)?advisory_lock(_shared)?\s*\(", re.IGNORECASE)
_POOLER = re.compile(
    r"pgbouncer|pgpool|pgcat|odyssey|supavisor|pooler|\b6432\b"
    r"|'DISABLE_SERVER_SIDE_CURSORS': True",  # Django needs it behind a pooler
    re.IGNORECASE,
)


_SETTING = re.compile(r"DATABASES(\['\w+'\].*)?")


def is_view(source: Source, function: Function) -> bool:
    """Tell whether a function is a view, which only requests call."""
    arguments = [each.arg for each in function.args.args[:2]]
    if source.owner(function):
        return function.name in _METHODS and arguments == ["self", "request"]
    return arguments[:1] == ["request"] and not function.name.startswith("_")


class Transactions:
    """What the rules about transactions find in a file."""

    def __init__(self, source: Source, regions: Regions) -> None:
        self.source = source
        self._regions = regions.all
        self._locked = {n for each in self._regions for n in source.inside(each.block.body)}

    def findings(self) -> Iterator[Found]:
        """Yield what is wrong."""
        for call in self.source.calls:
            name = getattr(call.func, "attr", "")
            block = atomic(self.source, call) if name in _SENDS else None
            if block and self._is_under_lock(call, block):
                yield Found("message-before-commit", call, "it is sent before the commit")
            elif name == "select_for_update":
                yield from self._rows(call)
            elif name == "execute" and call.args:
                statement = ast.unparse(self.source.value(call.args[0]))
                if _SESSION_LOCK.search(statement):
                    yield self._session(call, self._alias(call))
        for region in self._regions:
            made = self.source.value(region.node)
            if region.lock.kind == "session" and isinstance(made, ast.Call):
                using = argument(made, "using") or ast.Constant("default")
                yield self._session(made, str(getattr(using, "value", "?")))

    def _session(self, call: ast.Call, alias: str) -> Found:
        message = f"settings reach the database {alias!r} through a pooler"
        return Found("session-lock-behind-pooler", call, message, alias)

    def _alias(self, call: ast.Call) -> str:
        """Return the database alias that a function names, or the default one."""
        for each in self.source.inside(self.source.scope(call)):
            match each:
                case ast.Subscript(slice=ast.Constant(value=str() as alias)):
                    if self.source.name(each.value) == "connections":
                        return alias
        return "default"

    def _decorators(self, function: ast.AST) -> set[str]:
        made = getattr(function, "decorator_list", ())
        return {self.source.name(each) for each in made}

    def _is_under_lock(self, call: ast.Call, block: ast.AST) -> bool:
        decorated = self._decorators(self.source.scope(call)) & _LOCKS
        return bool(
            call in self._locked or decorated or self.source.called(block) & {"distlock", *WITHIN}
        )

    def _rows(self, call: ast.Call) -> Iterator[Found]:
        scope, block = self.source.scope(call), atomic(self.source, call)
        if block is None and isinstance(scope, Function) and self._is_run(call):
            if self._is_entry(scope) or self._is_too_early(scope, call):
                message = "no transaction is open here"
                yield Found(_ROWS, call, message, REQUEST if is_view(self.source, scope) else "")
        elif isinstance(block, ast.With | ast.AsyncWith) and not atomic(self.source, block):
            for saved in self._saved_behind(block, call):
                message = f"the row is free at the end of the block, and saved in line {saved}"
                yield Found(_ROWS, call, message)

    def _is_run(self, call: ast.Call) -> bool:
        """Tell whether a query runs in the statement that makes it."""
        child: ast.AST = call
        for each in self.source.above(call):
            if isinstance(each, ast.For | ast.AsyncFor):
                return child is each.iter
            if isinstance(each, ast.Attribute) and _QUERIES.fullmatch(each.attr):
                return True
            if isinstance(each, ast.Call) and child is not each.func:
                return self.source.name(each.func) in _TAKING
            if isinstance(each, ast.stmt):
                return False
            child = each
        return False

    def _is_entry(self, function: Function) -> bool:
        """Tell whether only Django, a task queue or a command calls a function."""
        if self._decorators(function) & _TASKS:
            return True
        is_command = function.name == "handle" and self.source.owner(function)
        return bool(is_command) or is_view(self.source, function)

    def _is_too_early(self, function: Function, call: ast.Call) -> bool:
        """Tell whether a function opens a transaction only after it has read the rows."""
        return any(
            isinstance(each, ast.With | ast.AsyncWith)
            and each.lineno > call.lineno
            and atomic(self.source, each.body[0]) is each
            for each in self.source.inside(function)
        )

    def _saved_behind(self, block: ast.stmt, call: ast.Call) -> Iterator[int]:
        """Yield the first line after a block that saves a row which the block had locked."""
        lines = []
        for each in self.source.calls:
            match each.func:
                case ast.Attribute(value=ast.Name() as row, attr="save" | "asave"):
                    if each.lineno > (block.end_lineno or 0):
                        is_row = call in {*ast.walk(self.source.value(row))}
                        lines += [each.lineno] if is_row else []
        yield from sorted(lines)[:1]


def conditions(source: Source) -> Iterator[str]:
    """Yield REQUEST if settings make requests transactions, and their aliases behind a pooler."""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and _SETTING.fullmatch(ast.unparse(node.targets[0])):
            text = ast.unparse(node)
            if re.search(r"'ATOMIC_REQUESTS'(: |\] = )(?!False)", text):
                yield REQUEST
            databases = {ast.unparse(node.targets[0])[len("DATABASES['") :]: text}
            if isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                databases = {ast.unparse(k)[1:] if k else "": ast.unparse(v) for k, v in pairs}
            for alias, said in databases.items():
                if _POOLER.search(said):
                    yield alias.partition("'")[0]
