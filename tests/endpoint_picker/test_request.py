"""Reading of a body: the model, the dialogue, and bodies that can be no request."""

import json

import pytest

from endpoint_picker.request import read_request
from frontend.errors import InvalidRequest
from tests.endpoint_picker.gateway import CHAT, chat


def affinity(body, path=CHAT, **headers):
    return read_request(path, {name.replace("_", "-"): value for name, value in headers.items()}, body).affinity


def test_all_turns_of_a_dialogue_belong_together_and_others_do_not():
    first = affinity(chat("Hello"))
    assert first == affinity(chat("Hello", "Hi!", "How are you?"))
    assert first == affinity(chat("Hello", temperature=1))
    assert first != affinity(chat("Good morning"))
    assert first != affinity(chat("Hello", model="other"))


def test_the_systems_message_alone_does_not_bind():
    def asked(text):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        return affinity(json.dumps({"model": "m", "messages": messages}).encode())

    assert asked("one") != asked("two")


def test_a_session_of_the_client_comes_before_the_prompt():
    assert affinity(chat("a"), x_session_id="s") == affinity(chat("b"), x_session_id="s")
    assert affinity(chat("a"), x_session_id="s") == affinity(chat("b", prompt_cache_key="s"))
    assert affinity(chat("a"), x_session_id="s") != affinity(chat("a"), x_session_id="t")
    assert affinity(None, x_session_id="s") != b""


def test_completions_with_the_same_beginning_belong_together():
    def asked(prompt):
        return affinity(json.dumps({"model": "m", "prompt": prompt}).encode(), "/v1/completions")

    long = "once upon a time " * 100
    assert asked(long) == asked(long + "and then")
    assert asked("x" + long) != asked(long)
    assert asked(list(range(300))) == asked(list(range(400)))


def test_requests_of_other_routes_are_left_to_the_endpoint():
    assert read_request("/v1/models", {}, None) == read_request("/v1/audio/transcriptions", {}, b"\x00binary")
    assert read_request("/tokenize", {}, b'{"model": "m", "prompt": "x"}').model == "m"


def test_fields_that_only_other_servers_have_are_no_problem():
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    assert read_request(CHAT, {}, json.dumps(body).encode()).model == "m"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b"[1]", "must be a JSON object, got [1]"),
        (b'{"model": 7}', "model must be a string, got 7"),
    ],
)
def test_a_body_that_can_be_no_request_is_refused(body, message):
    for path in (CHAT, "/prefix/v1/completions?x=1"):
        with pytest.raises(InvalidRequest, match="must be") as caught:
            read_request(path, {}, body)
        assert message in caught.value.message
