"""Events of streams: those between the first and the last one come from a template and equal what is encoded."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.api.formats import ChatFormatter, ChunkFormatter, CompletionFormatter
from frontend.api.formatter import ResponseOptions
from frontend.output import OutputChunk

FORMATS = (CompletionFormatter, ChatFormatter)
OPTIONS = (ResponseOptions(), ResponseOptions(include_usage=True, return_token_ids=True))


def formatter(form: type[ChunkFormatter], options: ResponseOptions) -> ChunkFormatter:
    request = SimpleNamespace(request_id='cmpl-"\0"', prompt_ids=np.arange(3))
    generation: Any = SimpleNamespace(request=request, leader=None, stats=SimpleNamespace(cached_tokens=0))
    return form([generation], 'a "\0" model', options)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("options", OPTIONS)
@given(text=st.text(), ids=st.lists(st.integers(0, 2**31 - 1), max_size=3))
def test_an_event_between_the_first_and_the_last_holds_its_text_and_ids(
    form: type[ChunkFormatter], options: ResponseOptions, text: str, ids: list[int]
) -> None:
    made = formatter(form, options)
    made.events(0, OutputChunk((1,), "first"))
    data = made.events(0, OutputChunk(tuple(ids), text))
    assert data.startswith(b"data: {")
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
    event = json.loads(data[6:])
    assert (event["id"], event["model"]) == ('cmpl-"\0"', 'a "\0" model')
    [choice] = event["choices"]
    assert (choice["delta"]["content"] if form is ChatFormatter else choice["text"]) == text
    assert choice.get("token_ids", []) == (ids if options.return_token_ids else [])
    assert choice["finish_reason"] is None
    assert choice["logprobs"] is None
    assert ("usage" in event) == options.include_usage


def test_usage_that_grows_is_in_every_event() -> None:
    made = formatter(CompletionFormatter, ResponseOptions(include_usage=True, continuous_usage=True))
    events = [made.events(0, OutputChunk((token,), "x")) for token in range(3)]
    assert [json.loads(event[6:])["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
