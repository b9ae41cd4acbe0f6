"""Read the runbooks: their sections, and the blocks of commands in these.

A block is one of these, in `Confirm` or `Act`:

- `console`: each line that starts with `$ ` is a command. What stands below it is what it prints,
  among other lines: `…` stands for anything, and spaces are as wide as they like;
- `sql`: statements for the stores that its first line names, `-- PostgreSQL, SQLite`; in another
  database of the server with `-- PostgreSQL (database postgres)`;
- `python`: for `manage.py shell`.

A heading inside a section begins a way: what is to be done in one case. A block above the first of
them belongs to each way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "runbooks"
NAMES = (
    "stuck-lock",
    "lost-lease",
    "rejected-fence",
    "held-past-expiry",
    "store-unreachable",
    "failover",
    "clock-jump",
    "too-many-waiters",
)
SECTIONS = ("Symptom", "Confirm", "Act", "Prevent")
#: The stores, as the first line of a block of SQL names them.
STORES = {
    "PostgreSQL": "postgresql",
    "MariaDB": "mysql",
    "SQLite": "sqlite",
    "Session locks": "session",
}
#: Sections whose blocks are run.
RUN = ("Confirm", "Act")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a page.

    Attributes:
        way: The heading inside of the section that it stands below; "": none.
        stores: Those that it is for; empty: any.
        database: Where statements are run; "": in that of the locks.
        line: Where it begins.
    """

    page: str
    section: str
    way: str
    language: str
    stores: tuple[str, ...]
    text: str
    line: int
    database: str = ""

    def __str__(self) -> str:
        return f"{self.page}.md:{self.line}"

    def is_for(self, way: str, store: str) -> bool:
        """Say whether somebody runs it who goes this way, with this store."""
        return self.way in ("", way) and (not self.stores or store in self.stores)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A line of a console, and what it prints."""

    line: str
    prints: tuple[str, ...]


def sections(page: str) -> list[str]:
    """Return the headings of a page's sections."""
    return re.findall(r"^## (.+)$", _text(page), re.MULTILINE)


def blocks(page: str) -> list[Block]:
    """Return all blocks of the sections that are run."""
    found: list[Block] = []
    section = way = ""
    lines = iter(enumerate(_text(page).splitlines(), 1))
    for number, line in lines:
        if line.startswith("## "):
            section, way = line[3:], ""
        elif line.startswith("### "):
            way = line[4:]
        elif line.startswith("```"):
            inside = []
            for _, each in lines:
                if each == "```":
                    break
                inside.append(each)
            if section in RUN:
                found.append(_block(page, section, way, line[3:], "\n".join(inside), number))
    return found


def code_in_text(page: str) -> list[str]:
    """Return the code that stands in the text, between the blocks."""
    text = re.sub(r"^```.*?^```$", "", _text(page), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", text)]


def commands(block: Block) -> list[Command]:
    """Take a console apart. A line that ends with a backslash goes on in the next one."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            found[-1][1].append(line)
    return [Command(line=line, prints=tuple(prints)) for line, prints in found]


def statements(block: Block) -> list[str]:
    """Take a block of SQL apart."""
    return [each for each in re.split(r";\s*?$", block.text, flags=re.MULTILINE) if each.strip()]


def _block(page: str, section: str, way: str, language: str, text: str, line: int) -> Block:
    stores: tuple[str, ...] = ()
    database = ""
    if language == "sql":
        first, _, rest = text.splitlines()[0].removeprefix("-- ").partition(" (database ")
        stores, database = tuple(STORES[each] for each in first.split(", ")), rest.rstrip(")")
    elif language == "console" and "redis-cli" in text:
        stores = ("redis",)
    return Block(
        page=page, section=section, way=way, language=language,
        stores=stores, text=text, line=line, database=database,
    )  # fmt: skip


def _text(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text()
