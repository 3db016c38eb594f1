"""Versions of the record of objectives as texts, and in files."""

import pytest

from conductor.errors import SharedStoreRefused
from conductor.slo.versions import SloVersion, VersionReader


def text_of(number: int) -> str:
    return SloVersion(number, '{"cluster":{"ttft":"1s"}}', "alice", "a test", 1.0, "admin").to_json()


def test_a_text_that_was_read_is_not_read_again_until_it_was_gone() -> None:
    reader = VersionReader()
    one, two = reader.read([text_of(1), text_of(2)])
    assert [version.version for version in (one, two)] == [1, 2]
    assert reader.read([text_of(2)])[0] is two
    assert reader.read([text_of(1)])[0] is not one


def test_a_text_beside_known_ones_is_looked_at() -> None:
    reader = VersionReader()
    reader.read([text_of(1)])
    with pytest.raises(SharedStoreRefused):
        reader.read([text_of(1), text_of(2).replace("1s", "2s")])
    with pytest.raises(SharedStoreRefused):
        reader.read(["[" * 200_000])
