"""Operations on keys of a cache or of Redis, and the rules about them."""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .rules import Found
from .sources import Scope, Source, Try, argument, is_constant, words

#: For each call: the stores that have it ("any": the name is unique), and its effect on the key.
_CALLS = {
    name: (store, does)
    for store, does, names in (
        ("any", "take", "setnx"),
        ("cache", "take", "add aadd"),
        ("cache redis", "read", "get aget has_key ahas_key exists"),
        ("cache redis", "write", "set aset setex"),
        ("cache redis", "drop", "delete adelete unlink"),
        ("any", "expire", "expire pexpire expireat pexpireat"),
        ("cache redis", "count", "incr aincr getset"),
    )
    for name in names.split()
}
_REDIS = re.compile(
    r"(^|\.)(Strict)?(Redis|Valkey)(Cluster)?(\.from_url)?\(\)$|redis_connection\(\)"
)
CLOCKS = {"monotonic", "now", "perf_counter", "time"}


#: Calls that lock until the transaction ends.
WITHIN = {"select_for_update", "transaction_lock", "atransaction_lock"}


@dataclass(frozen=True)
class Operation:
    """A call that does something to one key."""

    does: str
    key: str
    node: ast.Call
    scope: Scope
    #: Seconds until a taken key expires; infinite: it does not; None: unknown.
    ttl: float | None
    is_lockish: bool


def kind(source: Source, receiver: ast.expr) -> str:
    """Return the kind of a receiver: "cache", "redis", "pipeline", or "" for any other."""
    origin = source.origin(receiver)
    said = words(source.name(receiver))
    if ".pipeline()" in origin or said & {"pipe", "pipeline"}:
        return "pipeline"
    if _REDIS.search(origin) or said & {"redis", "valkey", "rds"}:
        return "redis"
    return "cache" if said & {"cache", "caches"} else ""


def ignored(call: ast.Call) -> Found:
    """Return the finding about a call whose result is ignored."""
    text = ast.unparse(call)
    text = text if len(text) <= 60 else f"{text[:57]}…"
    return Found("acquire-ignored", call, f"the result of `{text}` is not checked")


def _operation(source: Source, call: ast.Call) -> Iterator[Operation]:
    given = argument(call, "key", 0) or argument(call, "name", 0)
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _CALLS or not given:
        return
    (stores, does), of = _CALLS[call.func.attr], kind(source, call.func.value)
    if does == "write" and is_constant(argument(call, "nx"), True):
        stores, does = "any", "take"
    if of == "pipeline" or (stores != "any" and of not in stores.split()):
        return
    if does in ("take", "write") and len(call.args) + len(call.keywords) < 2:
        return  # `add` of a set
    scope, text = source.scope(call), source.value(given)
    key = ast.unparse(text)
    if isinstance(text, ast.Name):
        key += f" of {getattr(scope, 'name', '')}"
    yield Operation(does, key, call, scope, _ttl(source, call), source.is_lockish(given))


def _ttl(source: Source, call: ast.Call) -> float | None:
    name = getattr(call.func, "attr", "")
    if name in ("add", "aadd"):
        timeout = argument(call, "timeout", 2)
        return source.number(timeout) if timeout else 300  # Django's default
    for keyword, unit in (("ex", 1), ("timeout", 1), ("px", 1000)):
        if given := argument(call, keyword):
            number = source.number(given)
            return number / unit if number is not None else None
    return math.inf


def _at(one: Operation) -> tuple[int, int]:
    return one.node.end_lineno or 0, one.node.end_col_offset or 0


class Stores:
    """The operations of a file, and what the rules find in them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.operations = [each for call in source.calls for each in _operation(source, call)]
        self._by_key = defaultdict[str, list[Operation]](list)
        for each in self.operations:
            self._by_key[each.key].append(each)

    def same(self, one: Operation, *does: str) -> list[Operation]:
        """Return the other operations of these kinds that the same function does to the key."""
        others = (each for each in self._by_key[one.key] if each.scope is one.scope)
        return [each for each in others if each.does in does and each is not one]

    def findings(self) -> Iterator[Found]:
        """Yield what is wrong."""
        rules = {"take": self._taken, "drop": self._dropped, "read": self._read}
        for each in self.operations:
            if each.does in rules:
                yield from rules[each.does](each)

    def _taken(self, take: Operation) -> Iterator[Found]:
        later = [each for each in self.same(take, "read") if _at(each) > _at(take)]
        is_value = later or self.same(take, "count", "take")
        is_lock = take.is_lockish or self.same(take, "drop")
        if is_lock and not is_value and self.source.is_ignored(take.node):
            yield ignored(take.node)
        expire = self.same(take, "expire")
        if take.ttl == math.inf and expire and (take.is_lockish or not is_value):
            message = f"its timeout follows in line {expire[0].node.lineno}, by a second command"
            yield Found("setnx-then-expire", take.node, message)

    def _dropped(self, drop: Operation) -> Iterator[Found]:
        takes = [each for each in self._by_key[drop.key] if each.does == "take"]
        taken = [each for each in takes if each.ttl != math.inf or self.same(each, "expire")]
        by_hand = words(getattr(drop.scope, "name", "")) & {"force", "clear", "reset", "test"}
        # Outside of a `finally`, the key may be a mark that is removed, and no lock.
        is_lock = drop.is_lockish or self._is_final(drop.node)
        if taken and is_lock and not by_hand and not self._is_compared(drop):
            message = f"the key was acquired in line {taken[0].node.lineno}, and may have ended"
            yield Found("delete-without-token", drop.node, message)

    def _is_final(self, node: ast.AST) -> bool:
        pairs = pairwise([node, *self.source.above(node)])
        return any(isinstance(up, Try) and child in up.finalbody for child, up in pairs)

    def _is_compared(self, drop: Operation) -> bool:
        """Tell whether the function compares a token or the time left, or watches the key."""
        reads = {each.node for each in self.same(drop, "read")}
        for each in self.source.inside(drop.scope):
            if not isinstance(each, ast.Compare) or isinstance(each.ops[0], ast.Is | ast.IsNot):
                continue
            if reads & self.source.behind(each) or CLOCKS & self.source.called(each):
                return True
        return "watch" in self.source.called(drop.scope)

    def _read(self, read: Operation) -> Iterator[Found]:
        later = [each.node for each in self.same(read, "write") if _at(each) > _at(read)]
        if not later or self.same(read, "take") or self._is_guarded(read):
            return
        drops = {each.node for each in self.same(read, "drop")}
        test = self._test(read)
        if test is None or drops & {*self.source.inside(test.body)}:
            return  # the value is used, or the key is a switch
        ends = isinstance(test.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
        if not (ends or isinstance(test, ast.While) or later[0] in {*ast.walk(test)}):
            return  # the key is set whatever the read returned
        if read.is_lockish or (drops and isinstance(argument(later[0], "value", 1), ast.Constant)):
            message = f"it is set in line {later[0].lineno}, by a second call"
            yield Found("get-then-set", read.node, message)

    def _test(self, read: Operation) -> ast.If | ast.While | None:
        """Return the statement that tests whether the key of a read exists."""
        for each in self.source.inside(read.scope):
            if isinstance(each, ast.If | ast.While) and read.node in self.source.behind(each.test):
                said = ast.unparse(each.test)
                return None if re.search(r"[!=]= (?!True|\d|['\"])", said) else each
        return None

    def _is_guarded(self, read: Operation) -> bool:
        """Tell whether the source shows that another lock is held during a read."""
        items = [i for e in self.source.above(read.node) for i in getattr(e, "items", ())]
        held = any(self.source.is_lockish(item.context_expr) for item in items)
        return held or bool(self.source.called(read.scope) & WITHIN)
