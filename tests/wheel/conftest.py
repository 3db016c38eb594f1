"""Fixtures: the wheels of the project and of the client, and Pythons that have them."""

from pathlib import Path

import pytest

from tests.wheel.environments import CLIENT, ROOT, build, environment_with, link_client_dependencies, see_all_packages


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, freshly built."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel; it sees the present one's dependencies, but not the source tree."""
    python, site = environment_with(wheel, tmp_path_factory.mktemp("environment"))
    see_all_packages(site)
    return python


@pytest.fixture(scope="session")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's wheel, freshly built."""
    return build(CLIENT, tmp_path_factory.mktemp("client-wheel"))


@pytest.fixture(scope="session")
def client_installed(client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the client's wheel, its declared dependencies and theirs, and nothing else."""
    python, site = environment_with(client_wheel, tmp_path_factory.mktemp("client-environment"))
    link_client_dependencies(site)
    return python
