"""The wheel as somebody else gets it: built, installed without the source tree in sight, and used."""

import json
import subprocess
import tomllib
import zipfile
from pathlib import Path

from tests.wheel.environments import ROOT, build, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [Path(path).name for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


def test_the_same_sources_make_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    assert build(ROOT, tmp_path).read_bytes() == wheel.read_bytes()


def test_the_wheel_holds_model_trace_and_their_notices(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in ("model.safetensors", "config.json", "tokenizer.json", "SHA256SUMS", "LICENSE", "NOTICE"):
        assert f"moonpool/data/model/{needed}" in names
    trace_files = [name for name in names if name.startswith("traces/data/")]
    assert any("conversation" in name for name in trace_files)
    assert any("NOTICE" in name or "LICENSE" in name for name in trace_files)


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    shipped = [path.removeprefix("proto/") for path in tracked if path.removeprefix("proto/").split("/")[0] in PACKAGES]
    assert set(shipped) <= names


def test_the_wheel_holds_the_console(wheel: Path) -> None:
    page = ROOT / "frontend" / "console" / "page"
    wanted = {path.relative_to(ROOT).as_posix() for path in page.iterdir()}
    assert {"frontend/console/page/index.html", "frontend/console/page/console.css"} <= wanted
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_the_templates_of_the_load_test_s_pages(wheel: Path) -> None:
    templates = ROOT / "loadtest" / "templates"
    wanted = {path.relative_to(ROOT).as_posix() for path in templates.iterdir()}
    assert {"loadtest/templates/base.html", "loadtest/templates/replay.html", "loadtest/templates/page.css"} <= wanted
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_every_package_is_imported_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = (
        f"import importlib, json\nprint(json.dumps([importlib.import_module(name).__file__ for name in {PACKAGES!r}]))"
    )
    shown = run(installed, "-W", "error::ImportWarning", "-c", script, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    environment = installed.parent.parent
    assert all(Path(path).is_relative_to(environment) for path in json.loads(shown.stdout.splitlines()[-1]))


def test_the_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    shown = run(installed.with_name("moonpool"), "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "serve" in shown.stdout


def test_the_bundled_model_and_trace_load_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = (
        "import numpy as np\n"
        "from engine import load_model\n"
        "from settings.worker import BUNDLED_MODEL\n"
        "from traces import CONVERSATION, load_trace\n"
        "model = load_model(BUNDLED_MODEL, threads=1)\n"
        "scores = model.score(np.arange(8, dtype=np.int32))\n"
        "print(len(load_trace(CONVERSATION).rows), scores.shape == (8, model.config.vocab_size))"
    )
    shown = run(installed, "-c", script, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split() == ["12031", "True"]
