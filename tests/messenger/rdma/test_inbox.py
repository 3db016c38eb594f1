"""Frames cut into fragments and put together again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.errors import ProtocolError
from messenger.rdma.inbox import HEADER_NBYTES, PLACE_NBYTES, ROOM_NBYTES, Assembly, fragments, limit_only


def carried(frames: list[bytes]) -> list[bytes]:
    """The frames, packed place by place and taken as they arrive."""
    assembly, number, found = Assembly(), 0, []
    for frame in frames:
        for fragment in fragments(frame):
            place = memoryview(bytearray(PLACE_NBYTES))
            nbytes = fragment.pack(place, number, limit=number + 5)
            limit, whole, _ = assembly.take(place, nbytes)
            assert limit == number + 5
            number += 1
            if whole is not None:
                found.append(whole)
    return found


@given(st.lists(st.integers(1, 3 * PLACE_NBYTES), max_size=6))
def test_frames_of_any_size_come_out_as_they_went_in(sizes: list[int]) -> None:
    frames = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    assert carried(frames) == frames


@pytest.mark.parametrize("nbytes", [1, ROOM_NBYTES - 1, ROOM_NBYTES, ROOM_NBYTES + 1, 2 * ROOM_NBYTES])
def test_frames_at_the_edge_of_a_place_use_as_few_as_possible(nbytes: int) -> None:
    assert len(list(fragments(bytes(nbytes)))) == -(-nbytes // ROOM_NBYTES)


def test_a_bare_limit_is_no_frame() -> None:
    place = memoryview(bytearray(PLACE_NBYTES))
    nbytes = limit_only().pack(place, 0, limit=7)
    assert Assembly().take(place, nbytes) == (7, None, True)


@pytest.mark.parametrize("number", [1, 5, (1 << 32) - 1])
def test_a_fragment_out_of_turn_is_refused(number: int) -> None:
    place = memoryview(bytearray(PLACE_NBYTES))
    nbytes = fragments(b"frame")[0].pack(place, number, limit=0)
    with pytest.raises(ProtocolError, match="expected fragment 0"):
        Assembly().take(place, nbytes)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_fragment_of_another_length_than_the_hardware_wrote_is_refused(wrong: int) -> None:
    place = memoryview(bytearray(PLACE_NBYTES))
    nbytes = fragments(b"frame")[0].pack(place, 0, limit=0)
    with pytest.raises(ProtocolError, match="expected fragment"):
        Assembly().take(place, nbytes + wrong)


@pytest.mark.parametrize("nbytes", [0, HEADER_NBYTES - 1, PLACE_NBYTES + 1])
def test_a_fragment_of_no_possible_length_is_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="must have"):
        Assembly().take(memoryview(bytearray(PLACE_NBYTES)), nbytes)


def test_a_frame_without_end_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        carried([bytes(6 << 20)])
