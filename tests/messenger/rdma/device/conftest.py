"""Tests against verbs devices, for the inside of the bed (`make test-rdma`); elsewhere they are not collected."""

import os
from dataclasses import dataclass

import pytest

if "RDMA_VM" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True)
class Rail:
    """A device of this machine, and the address of its interface."""

    device: str
    address: str


def _rails() -> list[Rail]:
    listed = os.environ.get("RDMA_VM_RAILS", "")
    return [Rail(*entry.split("=")) for entry in listed.split(",") if entry]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rail" in metafunc.fixturenames:
        metafunc.parametrize("rail", _rails(), ids=lambda rail: rail.device)
