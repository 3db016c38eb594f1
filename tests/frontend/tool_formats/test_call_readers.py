"""Parsers of tool calls: what is a call and what is content, however the text is split into pieces."""

import json
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.tool_formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAMED,
    OPENAI,
    QWEN3_CODER,
    CallDelta,
    ToolFormat,
    ToolSpec,
)

PROPERTIES = {"where": {"type": "string"}, "days": {"type": "integer"}, "any": {}}
TOOLS = [ToolSpec("look", {"properties": PROPERTIES}), ToolSpec("now", {"type": "object"})]
ARGUMENTS = '{"a": "}{ \\" ]", "b": [1, {}]}'
HERMES_CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "look", "parameters": {ARGUMENTS}}}'
MISTRAL_CALL = f'{{"name": "look", "arguments": {ARGUMENTS}}}'
HARMONY_CALL = f"<|channel|>commentary to=functions.look<|message|>{ARGUMENTS}<|call|>"
LOOK = ("look", ARGUMENTS)
XML_CALL = (
    '<tool_call>\n<function=look>\n<parameter=where>\na "b"\n\nc\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "<parameter=any>\nNaN\n</parameter>\n</function>\n</tool_call>"
)
XML_LOOK = ("look", '{"where": "a \\"b\\"\\n\\nc", "days": 3, "any": "NaN"}')
Read = tuple[str, list[tuple[str, str]]]


def read(form: ToolFormat, pieces: list[str]) -> Read:
    """Return (content, (name, arguments) of each call) of an answer that comes in pieces."""
    reader = form.reader(TOOLS)
    content, calls = "", list[tuple[str, str]]()
    for at, piece in enumerate(pieces, start=1):
        delta = reader.feed(piece, is_last=at == len(pieces))
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    return content, calls


CASES: list[tuple[ToolFormat, str, Read]] = [
    (HERMES, f"so\n{HERMES_CALL}\n{HERMES_CALL}", ("so\n", [LOOK, LOOK])),
    (HERMES, '<tool_call>{"name":"now","arguments":{}}</tool_call> and so', ("and so", [("now", "{}")])),
    (HERMES, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', ("ALL", [])),
    (HERMES, "<tool_call>\nnothing</tool_call> <tool", ("ALL", [])),
    (HERMES, '<tool_call>\n{"name": "now", "argu', ("ALL", [])),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": [1]}', ("ALL", [])),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a', ("", [("now", '{"a')])),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool', ("", [("now", "{}")])),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}, "b": 1}', (', "b": 1}', [("now", "{}")])),
    (LLAMA3_JSON, LLAMA_CALL, ("", [LOOK])),
    (LLAMA3_JSON, f" {LLAMA_CALL}; {LLAMA_CALL}", ("", [LOOK, LOOK])),
    (LLAMA3_JSON, f"so <|python_tag|>{LLAMA_CALL}", ("so ", [LOOK])),
    (LLAMA3_JSON, f"<|python_tag|>{LLAMA_CALL}; so", ("; so", [LOOK])),
    (LLAMA3_JSON, f"so {LLAMA_CALL}", ("ALL", [])),
    (LLAMA3_JSON, '{"name": "Bob", "parameters": {}}', ("ALL", [])),
    (LLAMA3_JSON, '{"name": "lo', ("ALL", [])),
    (LLAMA3_JSON, "<|python_tag|>now.call()", ("ALL", [])),
    (MISTRAL, f"so [TOOL_CALLS][{MISTRAL_CALL}, {MISTRAL_CALL}]", ("so ", [LOOK, LOOK])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcDEF123"}]', ("", [("now", "{}")])),
    (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL}, so", (", so", [LOOK])),
    (MISTRAL, "[TOOL_CALLS]now", ("ALL", [])),
    (MISTRAL_NAMED, f"so[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS] {{}}", ("so", [LOOK, ("now", "{}")])),
    (MISTRAL_NAMED, "[TOOL_CALLS]other[ARGS]{}", ("ALL", [])),
    (MISTRAL_NAMED, "[TOOL_CALLS]now[AR", ("ALL", [])),
    (MISTRAL_NAMED, "[TOOL_CALLS]now[ARGS]{}so", ("so", [("now", "{}")])),
    (QWEN3_CODER, f"so\n{XML_CALL}\n{XML_CALL}", ("so\n", [XML_LOOK, XML_LOOK])),
    (QWEN3_CODER, "<tool_call><function=now></function></tool_call>so", ("so", [("now", "{}")])),
    (QWEN3_CODER, "<tool_call>\n<function=other>", ("ALL", [])),
    (QWEN3_CODER, "<tool_call>\n<function=lo", ("ALL", [])),
    (QWEN3_CODER, "<tool_call>\n<function=look>\n<parameter=where>\nUlm", ("", [("look", '{"where": "Ulm')])),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=look>\n<parameter=where>\nends with </parameter> in XML.\n</parameter> so\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        ("", [("look", '{"where": "ends with </parameter> in XML.\\n</parameter> so", "days": 3}')]),
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=look>\n<parameter=where>\n</parameter>\n\n</parameter>\n</function>\n</tool_call>",
        ("", [("look", '{"where": "</parameter>\\n"}')]),
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=look>\n<parameter=where>\n\n</parameter>\n</function>\n</tool_call>",
        ("", [("look", '{"where": ""}')]),
    ),
    (
        QWEN3_CODER,
        "<tool_call>\n<function=look>\n<parameter=where>\nUlm\n</par",
        ("", [("look", '{"where": "Ulm\\n</par')]),
    ),
    (QWEN3_CODER, "<tool_call>\n<function=look>\n<para", ("", [("look", "{")])),
    (QWEN3_CODER, "<tool_call><function=now>\nso", ("so", [("now", "{}")])),
    (OPENAI, f"so{HARMONY_CALL}", ("so", [LOOK])),
    (OPENAI, HARMONY_CALL.removesuffix("<|call|>"), ("", [LOOK])),
    (OPENAI, "<|channel|>commentary to=functions.other<|message|>{}", ("ALL", [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_are_told_from_content_and_nothing_is_lost(form: ToolFormat, text: str, expected: Read) -> None:
    content, calls = expected
    expected = (text if content == "ALL" else content, calls)
    assert read(form, [text]) == expected
    assert read(form, [*text]) == expected
    assert read(form, [text, ""]) == expected


FRAGMENTS = {
    HERMES: ["<tool_call>", "\n", HERMES_CALL, "</tool_call>", "<tool", '{"name": "look", "arguments": {', "}}", '"'],
    LLAMA3_JSON: ["<|python_tag|>", LLAMA_CALL, ";", " ", "<|py", '{"name": "now", "parameters": {', "}}", '"'],
    MISTRAL: ["[TOOL_CALLS]", "[", MISTRAL_CALL, ", ", "]", "[TOOL", '{"name": "now", "arguments": {', "}}", '"'],
    MISTRAL_NAMED: ["[TOOL_CALLS]", "look", "[ARGS]", "{", "}", "[TOOL", "[AR", '"', " "],
    QWEN3_CODER: ["<tool_call>", XML_CALL, "<function=look>", "<parameter=days>", "</parameter>", "</function>", "\n"],
    OPENAI: ["<|channel|>commentary to=functions.", HARMONY_CALL, "now", "<|message|>", "{", "}", "<|call|>", "<|"],
}


@given(st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([*FRAGMENTS]))
    text = "".join(data.draw(st.lists(st.sampled_from([*FRAGMENTS[form], "so"]), max_size=9)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, [text])
    assert read(form, pieces) == whole
    assert read(form, [*text, ""]) == whole
    shown = whole[0] + "".join(arguments for _, arguments in whole[1])
    assert shown.count("so") == text.count("so")


def test_a_call_is_returned_as_it_comes() -> None:
    reader = LLAMA3_JSON.reader(TOOLS)
    assert reader.feed('{"name": "lo', is_last=False).calls == ()
    assert reader.feed('ok", "parameters": {"a', is_last=False).calls == (
        CallDelta(0, "look", ""),
        CallDelta(0, None, '{"a'),
    )
    assert not reader.is_complete
    assert reader.feed('": 1}', is_last=False).calls == (CallDelta(0, None, '": 1}'),)
    assert reader.is_complete


def test_a_value_that_is_a_long_file_is_read_in_linear_time() -> None:
    text = "line </\n" * 100_000
    begin = process_time()
    content, calls = read(
        QWEN3_CODER,
        [
            "<tool_call>\n<function=look>\n<parameter=where>\n",
            *(text[at : at + 8] for at in range(0, len(text), 8)),
            "\n</parameter>\n</function>\n</tool_call>",
        ],
    )
    assert process_time() - begin < 3  # 0.3 s; searching the whole value for each piece takes 9 s
    assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == ("", [("look", {"where": text})])


def test_ids_have_the_form_that_templates_require() -> None:
    ids = {MISTRAL.call_id() for _ in range(9)}
    assert len(ids) == 9
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert HERMES.call_id().startswith("call_")
