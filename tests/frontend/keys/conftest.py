"""Known keys and the files that let them in."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ADMIN, USER, OTHER = "mp-admin-secret-1", "mp-user-secret-2", "mp-other-secret-3"


def entry_of(name: str, key: str, tenant: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **more}


ENTRIES = [
    entry_of("ops", ADMIN, "ops", scope="admin"),
    entry_of("acme-1", USER, "acme"),
    entry_of("beta-1", OTHER, "beta"),
]

WriteKeys = Callable[..., Path]


@pytest.fixture
def write_keys(tmp_path: Path) -> WriteKeys:
    """`write_keys(*entries)`: puts the file in its place at once, as operators are told to."""

    def write(*entries: dict[str, Any]) -> Path:
        path, partial = tmp_path / "keys.yaml", tmp_path / ".keys.yaml"
        partial.write_text(yaml.safe_dump({"keys": list(entries)}))
        return partial.replace(path)

    return write


def bearer(key: str) -> dict[str, dict[str, str]]:
    return {"headers": {"authorization": f"Bearer {key}"}}
