"""The bytes of messages: what is encoded is decoded again, and what was never encoded is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.errors import ProtocolError
from messenger.frames import (
    PREFIX,
    Ack,
    Goodbye,
    Message,
    Notify,
    Offer,
    Read,
    Refused,
    Welcome,
    Write,
    decode_body,
    decode_prefix,
    encode,
)

number = st.integers(-(1 << 63), (1 << 63) - 1)
token = st.integers(0, (1 << 64) - 1)
data = st.binary(max_size=60)
messages = st.one_of(
    st.builds(Write, number, number, number, token, number, number, data, st.booleans(), data, data),
    st.builds(Notify, number, data, data),
    st.builds(Read, number, number, token, number, data),
    st.builds(Ack, number, number),
    st.builds(Refused, number, st.text(max_size=30)),
    st.builds(Offer, number, number),
    st.builds(Welcome, st.text(max_size=9), token),
    st.builds(Goodbye),
)


def decoded(frame: bytes) -> Message:
    kind, length = decode_prefix(frame)
    assert length == len(frame) - PREFIX.size
    return decode_body(kind, frame[PREFIX.size :])


@given(message=messages)
def test_what_is_encoded_is_decoded_again(message: Message) -> None:
    again = decoded(encode(message))
    assert again == message
    assert type(again) is type(message)


@given(message=messages, noise=st.binary(max_size=200), cut=st.integers(0, 80))
def test_any_other_body_is_refused_or_says_just_what_it_holds(message: Message, noise: bytes, cut: int) -> None:
    frame = encode(message)
    kind = frame[5]
    for body in (noise, frame[PREFIX.size : PREFIX.size + cut] + noise):
        try:
            read = decode_body(kind, body)
        except ProtocolError:
            continue
        # Msgpack has several ways to write a number.
        if not isinstance(read, Offer | Welcome | Goodbye):
            assert encode(read)[PREFIX.size :] == body


@pytest.mark.parametrize("wrong", [Ack(1 << 63, 0), Notify(1 << 64, b"", b""), Read(1, 1, -1, 0, b"")])
def test_a_number_that_no_field_holds_is_an_error_of_the_protocol(wrong: Message) -> None:
    with pytest.raises(ProtocolError, match="is out of range"):
        encode(wrong)


def test_a_flag_is_0_or_1() -> None:
    frame = bytearray(encode(Write(1, 1, 1, 1, 1, 1, b"", True, b"", b"")))
    frame[-4:] = struct.pack("<I", 2)
    with pytest.raises(ProtocolError, match="Write"):
        decoded(bytes(frame))
