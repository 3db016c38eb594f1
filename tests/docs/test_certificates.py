"""The commands by which operators make certificates give certificates that nodes take."""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpc.tls import TlsFiles, load


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_documented_commands_make_certificates_that_nodes_take(page: Callable[[str], Any], tmp_path: Path) -> None:
    blocks = [block for block in page("securing.md").blocks("bash") if block.startswith("openssl ")]
    assert len(blocks) == 2
    for block in blocks:
        subprocess.run(["sh", "-e"], input=block, text=True, cwd=tmp_path, check=True, capture_output=True)
    material = load(TlsFiles(tmp_path / "node.pem", tmp_path / "node.key", tmp_path / "ca.pem"))
    assert 364 < (material.expires_s - time.time()) / 86400 < 366
    assert (tmp_path / "node.key").stat().st_mode & 0o077 == 0
