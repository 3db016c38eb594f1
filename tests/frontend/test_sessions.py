"""Sessions on the API: the accepted names, what the conductor gets, and what is refused."""

from typing import Any

import pytest

from frontend.sessions import MAX_SESSION_CHARS, PARENT_HEADERS, SESSION_HEADERS, session_number
from moonpool_proto.v1 import worker_pb2

COMPLETIONS, PROMPT = "/v1/completions", {"prompt": "the", "max_tokens": 1}
A, B = session_number("", "a"), session_number("", "b")


@pytest.fixture
async def ask(cluster: Any, front: Any) -> Any:
    """Send a request and return the session that the conductor was given."""
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))

    async def sent(fields: dict[str, Any], headers: dict[str, str]) -> Any:
        status, body = await front.post(COMPLETIONS, PROMPT | fields, headers=headers)
        assert status == 200, body
        return cluster.conductor.scheduled[-1]

    return sent


@pytest.mark.parametrize(
    ("fields", "headers", "session", "parent"),
    [
        *(({}, {name: "a"}, A, 0) for name in SESSION_HEADERS),
        *(({"session_id": "a"}, {name: "b"}, A, B) for name in PARENT_HEADERS),
        ({"session_id": "a", "parent_session_id": "b"}, {}, A, B),
        ({"prompt_cache_key": "a"}, {}, A, 0),
        ({"session_id": "a", "prompt_cache_key": "b"}, {}, A, 0),
        ({"session_id": "b"}, {"x-session-id": "a"}, A, 0),
        ({}, {"x-dynamo-session-id": "b", "x-session-id": "a"}, A, 0),
        ({}, {"x-parent-session-id": "b"}, B, B),
    ],
)
async def test_the_conductor_gets_the_session_under_all_its_names(ask, fields, headers, session, parent):
    request = await ask(fields, headers)
    assert (request.session.id, request.session.parent_id) == (session, parent)


async def test_without_an_id_there_is_no_session(ask):
    request = await ask({"session_id": ""}, {"x-session-id": " "})
    assert not request.HasField("session")


async def test_the_clients_text_stays_in_the_frontend(ask):
    request = await ask({}, {"x-session-id": "secret-run"})
    assert b"secret-run" not in request.SerializeToString()


@pytest.mark.parametrize("name", [*SESSION_HEADERS, *PARENT_HEADERS])
async def test_a_header_that_is_too_long_is_refused_by_name(front, name):
    status, body = await front.post(COMPLETIONS, PROMPT, headers={name: "a" * (MAX_SESSION_CHARS + 1)})
    assert (status, body["error"]["param"]) == (400, name)
    assert f"at most {MAX_SESSION_CHARS}" in body["error"]["message"]


@pytest.mark.parametrize("name", ["session_id", "parent_session_id", "prompt_cache_key"])
async def test_a_field_that_is_too_long_is_refused_by_name(front, name):
    status, body = await front.post(COMPLETIONS, PROMPT | {name: "a" * (MAX_SESSION_CHARS + 1)})
    assert (status, body["error"]["param"]) == (400, name)


def test_tenants_with_the_same_ids_have_different_numbers():
    numbers = [session_number(*each) for each in (("a", "b"), ("b", "a"), ("a", "c"), ("a b", ""), ("a", "b "))]
    assert len(set(numbers)) == len(numbers)
    assert session_number("a b", "c") != session_number("a", "b c")
    assert all(0 <= number < 1 << 64 for number in numbers)
