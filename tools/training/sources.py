"""The four Debian packages that contain the training text: names, hashes, licences, and download.

Packages are downloaded and unpacked into a cache folder, not installed.
"""

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.training.errors import SourceMismatch, SourceMissing


@dataclass(frozen=True)
class Source:
    """One package. ``sha256``: of the .deb file; ``share``: fraction of the plain-text windows."""

    name: str
    package: str
    version: str
    sha256: str
    licence: str
    share: float


SOURCES = (
    Source(
        name="kjv",
        package="bible-kjv-text",
        version="4.38",
        sha256="d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
        licence="King James Version, public domain; the Bible Retrieval System's legend is kept in NOTICE",
        share=0.40,
    ),
    Source(
        name="jargon",
        package="jargon-text",
        version="4.4.7-4.1",
        sha256="17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
        licence="Jargon File 4.4.7, public domain",
        share=0.20,
    ),
    Source(
        name="wordnet",
        package="wordnet-base",
        version="1:3.0-37",
        sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        licence="WordNet 3.0 licence, Princeton University (permissive, notice required)",
        share=0.15,
    ),
    Source(
        name="python",
        package="python3.11-doc",
        version="3.11.2-6+deb12u9",
        sha256="5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        licence="PSF licence version 2 (documentation examples also 0BSD)",
        share=0.25,
    ),
)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(source: Source, cache: Path) -> Path:
    """Return the folder of the unpacked package, after downloading it with ``apt-get download`` if it is not cached.

    Raises SourceMissing if the download fails and SourceMismatch if the hash differs from the recorded one.
    """
    debs = cache / "deb"
    debs.mkdir(parents=True, exist_ok=True)
    archive = next(debs.glob(f"{source.package}_*.deb"), None) or _download(source, debs)
    found = sha256_of(archive)
    if found != source.sha256:
        raise SourceMismatch(
            f"{archive} has sha256 {found}, expected {source.sha256} ({source.package} {source.version}); "
            "fetch that version from snapshot.debian.org, or record the new hash and train again"
        )
    folder = cache / "src" / source.package
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True, timeout=120)
    return folder


def _download(source: Source, folder: Path) -> Path:
    wanted = f"{source.package}={source.version}"
    result = subprocess.run(
        ["apt-get", "download", wanted], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    archive = next(folder.glob(f"{source.package}_*.deb"), None)
    if archive is None:
        raise SourceMissing(f"apt-get download {wanted} created no file in {folder}: {result.stderr.strip()}")
    return archive
