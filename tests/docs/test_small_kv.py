"""The model of docs/small-kv.md can be written by its command and needs the KV that the page says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from engine import check_folder
from worker.slot_memory import spec_of

ROOT = Path(__file__).parents[2]


def test_the_pages_model_has_the_pages_kv(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "small-kv.md").read_text()
    command = re.search(r"python (-m engine\.random_model .*?)\n\.venv", page, re.DOTALL)
    assert command is not None
    arguments = shlex.split(command[1].replace("\\\n", " "))
    arguments[2] = str(tmp_path / "model")
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, timeout=120)
    config = check_folder(tmp_path / "model")
    assert config.kv_layers == (0, 1, 2, 3)
    spec = spec_of(config.kv_groups("float32"), block_tokens=16)
    said = re.search(r"It needs ([\d,]+) bytes of KV per token .*? would\s+need\s+([\d,]+)\.", page, re.DOTALL)
    assert said is not None
    needed, plain = (int(number.replace(",", "")) for number in said.groups())
    assert spec.bytes_per_token == needed
    assert plain == config.num_layers * config.num_heads * 2 * config.head_dim * 4
