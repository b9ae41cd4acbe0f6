"""Code that runs under a lock: how long it may take, and whether a transaction outlasts it."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from .rules import Found
from .sources import Function, Scope, Source, Try, argument, is_constant
from .stores import CLOCKS, Stores, ignored, kind

#: The passes assumed for a loop whose length the source does not show.
PASSES = 10
_RENEWALS = {"extend", "aextend", "reacquire", "renew", "refresh", "expire", "pexpire", "touch"}
#: Calls that may wait for the seconds of their `timeout`.
_WAITS = re.compile(
    "get|post|put|patch|head|delete|request|stream|urlopen|run|call|check_(call|output)"
    "|communicate|wait|wait_for|result"
)
#: Classes of locks whose third argument is `timeout`.
_LOCK = re.compile(r"redis_lock\.Lock|redis\..*lock\.Lock|django_distlock\.compat\.redis\.Lock")
_ATOMIC = re.compile("(?<!non_)atomic|^transaction_locked$")
_WRITES = re.compile(
    "a?(save|create|update|delete|(get|update)_or_create|bulk_(create|update)|execute(many)?)"
)


class Lock(NamedTuple):
    """A lock, as its source describes it."""

    #: "foreign", "session" (of PostgreSQL), "ours", or "" for one that ends with a transaction.
    kind: str
    #: Seconds; infinite if it does not expire, None if the source does not show it.
    ttl: float | None


class Region(NamedTuple):
    """Code that runs under a lock."""

    lock: Lock
    node: ast.expr
    #: The block or function whose body runs under the lock.
    block: ast.With | ast.AsyncWith | Try | Function


def made_lock(source: Source, node: ast.expr) -> Lock | None:
    """Return the lock that an expression makes or acquires; None: it does neither."""
    node = source.value(node)
    if not isinstance(node, ast.Call):
        return None
    origin = source.origin(node.func)
    if origin.startswith("django_distlock") and isinstance(node.func, ast.Attribute):
        made = source.value(node.func.value)  # `distlock(…).acquire()`
        if isinstance(made, ast.Call) and node.func.attr.endswith("acquire"):
            renewed = is_constant(argument(node, "heartbeat"), True)
            return Lock("ours", math.inf if renewed else source.number(argument(made, "ttl")))
    if origin.startswith("django_distlock") and origin.endswith(".distlock"):
        still = is_constant(argument(node, "heartbeat"), False)
        still = still or is_constant(argument(node, "basic"), True)
        still = still and not is_constant(argument(node, "on_lost"), "ignore")  # loss is accepted
        return Lock("ours", source.number(argument(node, "ttl")) if still else math.inf)
    is_ours = origin.startswith("django_distlock.compat.")
    if origin.endswith(("pglock.advisory", "advisory_lock")):
        session = "ours" if is_ours else "session"
        return Lock("" if is_constant(argument(node, "xact"), True) else session, math.inf)
    by_class = _LOCK.fullmatch(origin)
    if not by_class:
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "lock":
            return None
        if not kind(source, node.func.value) and not argument(node, "blocking_timeout"):
            return None
    timeout = argument(node, "timeout", 2 if by_class else 1) or argument(node, "expire")
    renewed = not timeout or is_constant(argument(node, "auto_renewal"), True)
    made_by = "ours" if is_ours else "foreign"
    return Lock(made_by, math.inf if renewed else source.number(timeout))


def atomic(source: Source, node: ast.AST) -> ast.AST | None:
    """Return the innermost block or function around a node that opens a transaction."""
    child = node
    for each in source.above(node):
        if isinstance(each, ast.With | ast.AsyncWith):
            # In one `with`, a manager is only inside of those before it.
            before = each.items[: each.items.index(child)] if child in each.items else each.items
            if any(_is_atomic(source, item.context_expr) for item in before):
                return each
        if isinstance(each, Scope):
            decorators = getattr(each, "decorator_list", ())
            return each if any(_is_atomic(source, d) for d in decorators) else None
        child = each
    return None


def _is_atomic(source: Source, node: ast.expr) -> bool:
    """Tell whether a manager or a decorator opens a transaction."""
    given = node.args if isinstance(node, ast.Call) else []  # `method_decorator(atomic)`
    return any(_ATOMIC.search(source.name(each)) for each in (node, *given))


class Regions:
    """The code of a file that runs under a lock, and what the rules find there."""

    def __init__(self, source: Source, stores: Stores) -> None:
        self.source = source
        self._stores = stores
        self._drops = {each.node: each for each in stores.operations if each.does == "drop"}
        self.all = [region for node in source.nodes for region in self._regions(node)]

    def _regions(self, node: ast.AST) -> Iterator[Region]:
        if isinstance(node, Try):
            for each in self.source.inside(node.finalbody):
                if isinstance(each, ast.Call) and (lock := self._ended(each)):
                    yield Region(lock, each, node)
        elif isinstance(node, ast.With | ast.AsyncWith | Function):
            managers = [item.context_expr for item in getattr(node, "items", ())]
            for made in (*managers, *getattr(node, "decorator_list", ())):
                if lock := made_lock(self.source, made):
                    yield Region(lock, made, node)

    def _ended(self, call: ast.Call) -> Lock | None:
        """Return the lock that a call releases."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("release", "arelease"):
            return made_lock(self.source, call.func.value)
        takes = self._stores.same(self._drops[call], "take") if call in self._drops else []
        return Lock("foreign", takes[0].ttl) if takes else None

    def findings(self) -> Iterator[Found]:
        """Yield what is wrong."""
        for region in self.all:
            yield from self._too_long(region, region.lock.ttl or math.inf)
            if region.lock.kind in ("foreign", "session") and self._ends_early(region):
                message = "the transaction around it commits after the release"
                yield Found("lock-ends-before-commit", region.node, message)
        for call in self.source.calls:
            if self._is_unnamed(call) or (self._may_fail(call) and self.source.is_ignored(call)):
                yield ignored(call)

    def _is_unnamed(self, call: ast.Call) -> bool:
        """Tell whether a block also runs without the lock, and gives its lease no name."""
        item = self.source.parents[call]
        looks = not isinstance(item, ast.withitem) or item.optional_vars
        return not looks and is_constant(argument(call, "on_conflict"), "yield")

    def _may_fail(self, call: ast.Call) -> bool:
        """Tell whether a call tries to acquire a lock, and returns whether it did."""
        function = call.func
        if not isinstance(function, ast.Attribute) or not made_lock(self.source, function.value):
            return False
        once = is_constant(argument(call, "blocking", 0), False)
        once = once or argument(call, "blocking_timeout") is not None
        return function.attr.endswith("try_acquire") or (function.attr == "acquire" and once)

    def _too_long(self, region: Region, ttl: float) -> Iterator[Found]:
        work, loops = self._time(region.block.body) if math.isfinite(ttl) else (0.0, 0.0)
        if work + loops >= ttl and not self.source.called(region.block.body) & _RENEWALS:
            name = "loop" if loops >= ttl else "work"
            time = "never ends" if math.isinf(loops) else f"may take {work + loops:g} s"
            message = f"the {name} {time}, and the lock ends after {ttl:g} s"
            yield Found(f"{name}-outlasts-timeout", region.node, message)

    def _time(self, body: list[ast.stmt]) -> tuple[float, float]:
        """Return the seconds that lines may take by their text: outside of loops, and in loops."""
        work = loops = 0.0
        for each in body:
            match each:
                case ast.For() | ast.AsyncFor() | ast.While():
                    seconds = sum(self._time(each.body))
                    parts = [(0.0, self._passes(each) * seconds if seconds else 0.0)]
                case ast.If():
                    parts = [max(self._time(each.body), self._time(each.orelse), key=sum)]
                case ast.Match():
                    parts = [max((self._time(case.body) for case in each.cases), key=sum)]
                case ast.Try() | ast.TryStar():
                    parts = [*map(self._time, (each.body, each.orelse, each.finalbody))]
                case ast.With() | ast.AsyncWith():
                    parts = [self._time(each.body)]
                case _:
                    parts = [(self._wait(call), 0.0) for call in self.source.inside([each])]
            work += sum(part[0] for part in parts)
            loops += sum(part[1] for part in parts)
        return work, loops

    def _passes(self, loop: ast.For | ast.AsyncFor | ast.While) -> float:
        if isinstance(loop, ast.While):
            inside = [*self.source.inside(loop)]
            compared = [each for each in inside if isinstance(each, ast.Compare)]
            if self.source.called(compared) & CLOCKS:
                return 1
            ends = any(isinstance(each, ast.Break | ast.Return | ast.Raise) for each in inside)
            return math.inf if is_constant(loop.test, True) and not ends else PASSES
        over = self.source.value(loop.iter)
        if isinstance(over, ast.Tuple | ast.List | ast.Set):
            return len(over.elts)
        if isinstance(over, ast.Call) and self.source.name(over.func) == "range":
            bounds = [self.source.number(each) for each in over.args]
            if bounds and None not in bounds:
                # Python refuses some ranges, and cannot count others.
                with suppress(OverflowError, TypeError, ValueError):
                    return len(range(*(int(each or 0) for each in bounds)))
        return PASSES

    def _wait(self, call: ast.AST) -> float:
        """Return the seconds that a call may wait by its text; 0 if that does not say."""
        if not isinstance(call, ast.Call):
            return 0
        name, seconds = self.source.name(call.func), None
        if name == "sleep":
            seconds = self.source.number(argument(call, "delay", 0))
        elif _WAITS.fullmatch(name):
            seconds = self.source.number(argument(call, "timeout"))
        return 0 if seconds is None or math.isinf(seconds) else seconds

    def _ends_early(self, region: Region) -> bool:
        is_tried = isinstance(region.block, Try)
        at = region.block if is_tried else self.source.parents[region.node]
        return bool(atomic(self.source, at)) and self._writes(region.block.body, 2)

    def _writes(self, body: list[ast.stmt], depth: int) -> bool:
        """Tell whether lines, or functions of the same file that they call, use the database."""
        for each in self.source.inside(body):
            if isinstance(each, ast.Attribute) and each.attr == "objects":
                return True
            if not isinstance(each, ast.Call):
                continue
            if isinstance(each.func, ast.Attribute) and _WRITES.fullmatch(each.func.attr):
                if not kind(self.source, each.func.value):
                    return True
            elif depth and (own := self.source.own(each)) and self._writes(own.body, depth - 1):
                return True
        return False
