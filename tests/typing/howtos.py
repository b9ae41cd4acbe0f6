"""The code of the how-tos, read by mypy and pyright as in a project whose checks are strict.

Usage: python -m tests.typing.howtos. Annotations of their functions are the reader's business.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Pages whose blocks are in several modules. The others go on in one.
APART: dict[str, list[tuple[int, ...]]] = {
    "lock-views": [(0,), (1,), (2,)],
    "replace-other-locks": [(0,), (1,)],
    "lock-other-queues": [(0, 1, 2), (0, 3), (0, 4)],
    "test-code-that-locks": [(0,), (1,), (2,), (3,), (4,)],
}
#: What stays undone: names of the reader's project, and what stubs and Django's plugin would know.
#: Django's views are generic in its stubs alone.
MYPY = """
    --config-file= --strict --ignore-missing-imports --allow-untyped-defs --allow-incomplete-defs
    --allow-untyped-calls --allow-untyped-decorators --allow-subclassing-any
    --disable-error-code=name-defined --disable-error-code=type-arg
    --disable-error-code=var-annotated
""".split()  # noqa: SIM905 - as a list it would be a page
PYRIGHT = """
    MissingImports MissingModuleSource MissingParameterType MissingTypeArgument MissingTypeStubs
    UndefinedVariable
    UnknownArgumentType UnknownLambdaType UnknownMemberType UnknownParameterType
    UnknownVariableType UntypedBaseClass UntypedClassDecorator UntypedFunctionDecorator
    UnusedVariable
""".split()  # noqa: SIM905 - as above


def modules(page: Path) -> Iterator[tuple[str, str]]:
    """Give the modules of a page: their names and their code."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    # What was before is no code of the same module.
    blocks = [each for block in found for each in block.split("# after\n")]
    for number, part in enumerate(APART.get(page.stem, [tuple(range(len(blocks)))])):
        code = [blocks[each] for each in part]
        # "# shop/capture.py" is what others import.
        named = re.match(r"# shop/(\w+)\.py", "".join(code))
        yield named[1] if named else f"part_{number}", "\n\n".join(map(in_function, code))


def in_function(block: str) -> str:
    """Return a block of code; one that awaits is the body of a function."""
    if not re.search(r"^(\w+ = )?await ", block, re.MULTILINE):
        return block
    return f"async def typed():\n{textwrap.indent(block, '    ')}"


def main() -> int:
    """Write the modules, and have them read; return the exit status."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "howtos")
        for page in sorted((ROOT / "docs/howto").glob("*.md")):
            package = folder / page.stem.replace("-", "_")
            package.mkdir(parents=True)
            for each in (folder, package):
                (each / "__init__.py").touch()
            for name, code in modules(page):
                (package / f"{name}.py").write_text(code, encoding="utf-8")
        settings = {
            "typeCheckingMode": "strict",
            "extraPaths": [str(ROOT)],
            **{f"report{each}": False for each in PYRIGHT},
        }
        Path(home, "pyrightconfig.json").write_text(json.dumps(settings))
        readers = [
            ["-m", "mypy", *MYPY, "howtos"],
            ["-m", "basedpyright", "--pythonpath", sys.executable, "howtos"],
        ]
        environment = {**os.environ, "MYPYPATH": str(ROOT)}
        # Each of them computes on one processor.
        reading = [
            subprocess.Popen([sys.executable, *reader], cwd=home, env=environment)
            for reader in readers
        ]
        return max(each.wait() for each in reading)


if __name__ == "__main__":
    sys.exit(main())
