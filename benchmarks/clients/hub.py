"""Storage of a tokenizer in the layout of Hugging Face's cache, for tools that accept only repository names."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

REPOSITORY = "moonpool/bundled"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def store_tokenizer(home: Path, model: Path) -> str:
    """Store the model's tokenizer under `home` as the only revision of REPOSITORY; return the repository's name."""
    digest = hashlib.sha1()
    for name in FILES:
        digest.update((model / name).read_bytes())
    revision = digest.hexdigest()
    repository = home / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(model / name, snapshot / name)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    return REPOSITORY
