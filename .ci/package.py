"""Verify a release, and type the README into an empty Django project with nothing but its wheel.

Usage: package.py FOLDER AGAIN: two releases of one commit. The first folder gets the rest.
"""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
INSTALLED = """
import django_distlock
assert "site-packages" in django_distlock.__file__, "the sources answer, not the installed package"
"""


def check_contents(wheel: Path) -> None:
    """Compare the wheel, which was built from the sdist, with the sources."""
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "django_distlock").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == source, f"only in one of wheel and sources: {sorted(names ^ source)}"
    assert any(name.endswith(".sql") for name in names), "no SQL"
    assert "django_distlock/py.typed" in names, "no py.typed"


def check_description(wheel: Path) -> None:
    """Where the package is read there are no files: each link is an address of its own."""
    with ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        description = email.message_from_bytes(archive.read(metadata)).get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(links) > 40, f"{len(links)} links: where is the README?"
    relative = [each for each in links if not each.startswith("https://")]
    assert not relative, f"lead nowhere: {relative}"


def check_release(folder: Path, again: Path) -> None:
    """Do what SECURITY.md says to do with a download, and compare it with another build."""
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=folder)
    sums = (folder / "SHA256SUMS").read_text()
    published = {path.name for path in folder.iterdir()} - {"SHA256SUMS", ".gitignore"}
    assert set(re.findall(r"^[0-9a-f]{64}  (.+)$", sums, re.MULTILINE)) == published
    assert {Path(name).suffix for name in published} == {".gz", ".whl", ".json"}
    assert sums == (again / "SHA256SUMS").read_text(), "two builds of one commit differ"
    bill = json.loads((folder / "sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = bill["metadata"]["component"]
    assert (ours["name"], ours["version"]) == (project["name"], project["version"])
    (needed,) = [
        each["dependsOn"] for each in bill["dependencies"] if each["ref"] == ours["bom-ref"]
    ]
    direct = {re.match(r"[\w.-]+", each)[0].lower() for each in project["dependencies"]}
    named = {each["bom-ref"]: each["name"].lower() for each in bill["components"]}
    assert {named[each] for each in needed} == direct, f"the bill names {needed}"


def first_code() -> str:
    """Return the code that the README tells a newcomer to type."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (code,) = [each for each in blocks if 'distlock("invoice:42"' in each]
    return code


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that has to succeed; return what it printed."""
    print("package:", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    return done.stdout


def main(folder: Path, again: Path) -> None:
    """Do what a new user does."""
    check_release(folder, again)
    (wheel,) = folder.glob("*.whl")
    check_contents(wheel)
    check_description(wheel)
    project, environment = folder / "project", folder / "venv"
    python = environment / "bin" / "python"
    project.mkdir()
    run("uv", "venv", "--quiet", "--python", sys.executable, environment, cwd=folder)
    run("uv", "pip", "install", "--quiet", "--python", python, wheel, cwd=folder)
    run(python, "-m", "django", "startproject", "empty", ".", cwd=project)
    settings = project / "empty" / "settings.py"
    settings.write_text(settings.read_text() + 'INSTALLED_APPS += ["django_distlock"]\n')
    run(python, "manage.py", "check", cwd=project)
    run(python, "manage.py", "migrate", "--verbosity", "0", cwd=project)
    run(python, "manage.py", "makemigrations", "--check", "--dry-run", cwd=project)
    shell = (python, "manage.py", "shell", "--verbosity", "0", "--command")
    told = [run(*shell, INSTALLED + first_code(), cwd=project) for _ in range(2)]
    assert told == ["held, fence 1\n", "held, fence 2\n"], told
    for command in sorted((ROOT / "django_distlock/management/commands").glob("distlock_*.py")):
        run(python, "manage.py", command.stem, "--help", cwd=project)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
