"""Install the built wheel into an empty Django project, migrate, and take a lock.

Usage: package.py FOLDER, where the folder holds the wheel and the sdist and gets the rest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
LINES = """
import django_distlock
from django_distlock import distlock

assert "site-packages" in django_distlock.__file__, "the sources answer, not the installed package"
with distlock("invoice:42") as first:
    assert first.fence >= 1
with distlock("invoice:42") as second:
    assert second.fence > first.fence
print("fences", first.fence, second.fence)
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


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command that has to succeed."""
    print("package:", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def main(folder: Path) -> None:
    """Do what a new user does."""
    (wheel,) = folder.glob("*.whl")
    check_contents(wheel)
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
    run(python, "manage.py", "shell", "--verbosity", "0", "--command", LINES, cwd=project)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
