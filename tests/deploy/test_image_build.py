"""The image `cpu` is built from its Dockerfile, and serves.

buildah builds it without a daemon, on a base image that mmdebstrap makes from Debian's packages, as no registry may be
within reach. Both are Debian's packages and need root; without them the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ci_modules import ci_module

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "containers"
PROGRAMS = ("buildah", "mmdebstrap")
BASE = "docker.io/library/debian:bookworm-slim"  # the Dockerfile's
BUILD_LIMIT_S = 3600
RUN_LIMIT_S = 600
# Serves, answers one request, and ends; prints what was answered.
SERVE = """
set -eu
moonpool-entrypoint moonpool serve --host 127.0.0.1 --port 0 --run-dir /mnt/own/run --ready-file /mnt/own/ready &
trap 'kill $! 2>/dev/null || true' EXIT
while [ ! -s /mnt/own/ready ]; do kill -0 $!; sleep 0.2; done
url=$(python3 -c 'import json; print(json.load(open("/mnt/own/ready"))["url"])')
moonpool-healthcheck "${url##*:}"
python3 - "$url" <<'EOF'
import sys, urllib.request
body = b'{"prompt": "In the beginning", "max_tokens": 8, "ignore_eos": true}'
request = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})
print("ANSWER", urllib.request.urlopen(request, timeout=120).read().decode())
EOF
kill -TERM $!
wait $!
trap - EXIT
"""


class Buildah:
    """buildah with a store of its own, without namespaces: commands run in a chroot."""

    def __init__(self, folder: Path) -> None:
        self._command = [
            "buildah",
            f"--root={folder / 'store'}",
            f"--runroot={folder / 'run'}",
            "--storage-driver=vfs",
        ]

    def run(self, *arguments: str, limit_s: float = RUN_LIMIT_S) -> str:
        """Return what a subcommand prints; raises AssertionError with all of it if it fails."""
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, check=False, timeout=limit_s
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return done.stdout

    def config(self, image: str) -> dict[str, Any]:
        """Return what the image says of its programs, user and variables."""
        return dict(json.loads(self.run("inspect", "--type=image", image))["Docker"]["config"])


@pytest.fixture(scope="module")
def buildah() -> Iterator[Buildah]:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} must be installed (apt-get install {' '.join(missing)})")
    if os.geteuid() != 0:
        pytest.skip("images are built as root")
    with tempfile.TemporaryDirectory(prefix="images-") as name:
        found = Buildah(Path(name))
        archive = Path(name) / "base.tar"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(archive)], check=True, timeout=BUILD_LIMIT_S
        )
        container = found.run("from", "scratch").strip()
        found.run("add", "--quiet", container, str(archive), "/")
        found.run("commit", "--quiet", "--rm", container, BASE)
        yield found
        found.run("rm", "--all")


@pytest.fixture(scope="module")
def container(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A container of the image, built with the package sources of this machine's pip."""
    folder = tmp_path_factory.mktemp("sources")
    dockerfile = folder / "Dockerfile"
    dockerfile.write_text(stages_of((FOLDER / "Dockerfile").read_text(encoding="utf-8"), "cpu"), encoding="utf-8")
    buildah.run(
        "build",
        "--isolation=chroot",
        "--format=docker",  # that of OCI has no health check
        "--pull-never",
        "--target=cpu",
        f"--file={dockerfile}",
        f"--ignorefile={FOLDER / 'Dockerfile.dockerignore'}",
        *package_sources(folder),
        "--tag=moonpool",
        str(ROOT),
        limit_s=BUILD_LIMIT_S,
    )
    return buildah.run("from", "--pull-never", "moonpool").strip()


def stages_of(dockerfile: str, target: str) -> str:
    """Return a Dockerfile with the stages that a target needs: buildah before 1.31 builds the others, too."""
    before, *stages = re.split(r"(?m)^(?=FROM )", dockerfile)
    texts = {re.match(r"FROM \S+ AS (\S+)", text)[1]: text for text in stages}  # type: ignore[index]
    needed, waiting = set[str](), [target]
    while waiting:
        name = waiting.pop()
        needed.add(name)
        sources = re.findall(r"^FROM (\S+)|--from=(\S+)", texts[name])
        waiting += [one for pair in sources for one in pair if one in texts and one not in needed]
    return before + "".join(text for name, text in texts.items() if name in needed)


def package_sources(folder: Path) -> list[str]:
    """Return options with which pip finds packages in the build as it does on this machine, if it needs any."""
    install = ci_module("install")
    options = []
    if certificates := dict(install.pip_settings(Path(sys.executable), ("cert",)))["cert"]:
        settings = folder / "pip.conf"
        settings.write_text("[global]\ncert = /mnt/certificates.pem\n", encoding="utf-8")
        options += [f"--volume={settings}:/etc/pip.conf:ro", f"--volume={certificates[-1]}:/mnt/certificates.pem:ro"]
    links = install.pip_sources(Path(sys.executable))["find-links"]
    if install.has_cpu_torch(links):
        (wheel, *_) = [path for link in links for path in Path(link.removeprefix("file://")).glob("torch-*+cpu-*.whl")]
        index = folder / "simple" / "torch" / "index.html"
        index.parent.mkdir(parents=True)
        index.write_text(f'<!DOCTYPE html><a href="file:///mnt/wheels/{wheel.name}">{wheel.name}</a>', encoding="utf-8")
        options += [f"--volume={index.parents[1]}:/mnt/simple:ro", f"--volume={wheel.parent}:/mnt/wheels:ro"]
        options += ["--build-arg=TORCH_INDEX=file:///mnt/simple"]
    return options


def in_container(buildah: Buildah, container: str, *command: str) -> str:
    """Run a command as the image's user; /mnt/own is a folder of its own, as buildah's /tmp lacks the sticky bit."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 10001, 10001)
        options = ["--isolation=chroot", "--user=10001:10001", f"--volume={folder}:/mnt/own"]
        return buildah.run("run", *options, container, "--", *command)


def test_its_programs_start(buildah: Buildah, container: str) -> None:
    config = buildah.config("moonpool")
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"] == ["CMD", "moonpool-healthcheck"]
    command = config["Entrypoint"]
    assert re.fullmatch(r"moonpool \d+\.\d+\.\d+\S*\n", in_container(buildah, container, *command, "--version"))
    assert "--ready-file" in in_container(buildah, container, *command, "serve", "--help-all")


def test_a_doctor_finds_the_image_in_order(buildah: Buildah, container: str) -> None:
    in_container(buildah, container, "moonpool-entrypoint", "moonpool", "doctor")


def test_its_kernels_are_compiled_and_no_file_is_its_user_s(buildah: Buildah, container: str) -> None:
    kernels = in_container(buildah, container, "find", "/opt/moonpool/kernels", "-name", "*.nbc")
    assert len(kernels.splitlines()) >= 50
    own = ["find", "/etc", "/opt", "/usr", "/var", "-user", "10001", "-print"]
    assert in_container(buildah, container, "sh", "-c", f"{' '.join(own)} 2>/dev/null || true") == ""


def test_it_serves(buildah: Buildah, container: str) -> None:
    printed = in_container(buildah, container, "sh", "-c", SERVE)
    (answer,) = re.findall(r"^ANSWER (.*)$", printed, re.MULTILINE)
    assert json.loads(answer)["usage"]["completion_tokens"] == 8
