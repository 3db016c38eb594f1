"""The key under which an image is cached."""

import shutil
from pathlib import Path

import pytest

from tools.rdma_vm import recipe

SOURCE = Path(recipe.__file__).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "rdma_vm"))


def test_the_key_is_that_of_the_contents_not_of_the_place(copy: Path) -> None:
    assert recipe.image_key(copy) == recipe.image_key()


@pytest.mark.parametrize("name", ["recipe.py", "guest_kernel.py", "initramfs.py", "guest/initramfs.sh", "building.py"])
def test_a_change_of_what_decides_the_image_changes_the_key(copy: Path, name: str) -> None:
    with (copy / name).open("a") as file:
        file.write("# \n")
    assert recipe.image_key(copy) != recipe.image_key()


@pytest.mark.parametrize("name", ["guest/boot.sh", "machine.py", "image.py", "README.md"])
def test_what_is_not_in_the_image_leaves_the_key_alone(copy: Path, name: str) -> None:
    with (copy / name).open("a") as file:
        file.write("# \n")
    assert recipe.image_key(copy) == recipe.image_key()
