"""Strict mypy over every package, and proof that it looked: "Success" alone can mean two files.

Checks that the packages of the project and of mypy's configuration are the same, that mypy counts every file of them,
and that an error planted in each package is found.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLANTED = 'planted_error: int = "text"\n'
GENERATED_PACKAGES = {"proto/moonpool_proto"}
UNSHIPPED_PACKAGES = {"tools", "benchmarks"}


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages: list[str] = project["tool"]["mypy"]["packages"]
    shipped = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) - GENERATED_PACKAGES
    ours = shipped | UNSHIPPED_PACKAGES
    if ours != set(packages):
        print(f"packages of the project but not under mypy, or the reverse: {sorted(ours ^ set(packages))}")
        return 1
    with ThreadPoolExecutor() as pool:  # mypy keeps one core busy
        planted = pool.submit(packages_whose_error_is_missed, packages)
        outcome, missed = mypy(), planted.result()
    print("types: ", end="", flush=True)
    if outcome.returncode:
        print(outcome.stdout + outcome.stderr)
        return 1
    print(outcome.stdout.strip())
    seen = re.search(r"in (\d+) source files", outcome.stdout)
    num_files = sum(1 for package in packages for path in (ROOT / package).rglob("*") if is_counted(path))
    if seen is None or int(seen.group(1)) != num_files:
        print(f"mypy counts {seen and seen.group(1)} files, the packages have {num_files}")
        return 1
    if missed:
        print(f"mypy does not find an error planted in: {', '.join(missed)}")
        return 1
    print(f"types: an error planted in each of {len(packages)} packages is found")
    return 0


def is_counted(path: Path) -> bool:
    """Sources, and the data folders between them, which mypy takes for namespace packages."""
    if path.is_dir():
        return path.name.isidentifier() and path.name != "__pycache__" and not (path / "__init__.py").exists()
    return path.suffix == ".py"


def packages_whose_error_is_missed(packages: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--cache-dir", str(Path(folder) / "cache"), "--follow-imports=skip"]
        for package in packages:
            source = ROOT / package / "__init__.py"
            shadow = Path(folder) / f"{package}.py"
            shadow.write_text(source.read_text(encoding="utf-8") + PLANTED, encoding="utf-8")
            options += ["--shadow-file", str(source.relative_to(ROOT)), str(shadow)]
        found = mypy(*options).stdout
    return [
        package for package in packages if not re.search(rf"^{package}/__init__\.py:\d+: error: Incompat", found, re.M)
    ]


def mypy(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--no-color-output", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
