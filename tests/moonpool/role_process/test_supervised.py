"""Start of a role by its supervisor: as by the command line, but without its imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.role_process.supervised import run_supervised

HEAVY = {"torch", "numba", "messenger", "ray", "typer", "rich", "matplotlib", "aiohttp"}


def test_a_frontend_imports_nothing_heavy() -> None:
    code = (
        "import sys, frontend, moonpool.role_configs, moonpool.role_process.supervised; "
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments", [[], ["serve"], ["frontend"], ["frontend", "--port=0"], ["serve", "--config", "x"]]
)
def test_other_commands_are_left_to_the_command_line(arguments: list[str]) -> None:
    run_supervised(arguments)


def test_settings_that_are_refused_end_it_as_they_end_the_command(tmp_path: Path) -> None:
    settings = tmp_path / "frontend.yaml"
    settings.write_text("prot: 80\n")
    command = [sys.executable, "-P", "-m", "moonpool", "frontend", "--config", str(settings)]
    ended = [
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
        for environ in ({**os.environ, "MOONPOOL_SUPERVISOR_PID": str(os.getpid())}, dict(os.environ))
    ]
    assert [each.returncode for each in ended] == [2, 2]
    assert ended[0].stderr == ended[1].stderr
    assert "prot" in ended[0].stderr
