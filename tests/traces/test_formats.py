"""Other formats: every valid record is converted exactly, every damaged one is named with its line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import TraceError, TraceFormatError, TraceRow
from traces.errors import BadSourceSettings, FormatUnknown
from traces.formats import FORMATS, SourceSettings, detect_format
from traces.prompt_blocks import PromptBlocks
from traces.source import AUTO, TraceSource

DATA = Path(__file__).parent / "data"
TOKENS = st.integers(1, 3000)
OUTPUTS = st.integers(0, 3000)


def read(data: bytes, format_name: str = AUTO, **settings: Any) -> list[TraceRow]:
    return list(TraceSource(io.BytesIO(data), "t", format_name, SourceSettings(**settings)).rows())


def json_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def shared(a: TraceRow, b: TraceRow) -> int:
    """Number of leading ids that two rows have in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a.hash_ids, b.hash_ids, strict=False)) if x != y),
        min(len(a.hash_ids), len(b.hash_ids)),
    )


# Azure

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOMENTS = st.datetimes(datetime(2023, 1, 1), datetime(2025, 1, 1))
ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=-5, minutes=-30))])


@given(st.lists(st.tuples(MOMENTS, ZONES, TOKENS, OUTPUTS), min_size=1, max_size=20))
def test_azure_rows_keep_their_times_and_lengths(rows: list[tuple[datetime, timezone | None, int, int]]) -> None:
    moments = [(moment.replace(tzinfo=zone), prompt, output) for moment, zone, prompt, output in rows]
    text = "\r\n".join([AZURE_HEADER, *(f"{moment},{prompt},{output}" for moment, prompt, output in moments)])
    found = read(text.encode())
    assert [(row.input_length, row.output_length) for row in found] == [row[2:] for row in rows]
    for row, (moment, _, _) in zip(found, moments, strict=True):
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
        assert row.timestamp_ms == since // timedelta(milliseconds=1)
    ids = [each for row in found for each in row.hash_ids]
    assert len(set(ids)) == len(ids) == sum(-(-row.input_length // 512) for row in found)


def test_azure_columns_are_found_by_their_names() -> None:
    text = "\ufeffTIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00.1234567,2,900,120\n"
    (row,) = read(text.encode())
    assert (row.input_length, row.output_length) == (900, 120)


# BurstGPT

BURST_HEADER = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
SESSIONS = st.sampled_from(["", "6f1c-a", "6f1c-b"])


@given(st.lists(st.tuples(st.integers(0, 10**10), SESSIONS, TOKENS, OUTPUTS), min_size=1, max_size=20))
def test_burstgpt_rows_keep_sessions_and_share_nothing(rows: list[tuple[int, str, int, int]]) -> None:
    lines = [
        f"{ms / 1000},{session},3,GPT-4,{prompt},{output},{prompt + output},{'Conversation' if session else 'API'} log"
        for ms, session, prompt, output in rows
    ]
    found = read("\n".join([BURST_HEADER, *lines]).encode())
    assert [(row.timestamp_ms, row.session, row.input_length, row.output_length) for row in found] == rows
    ids = [each for row in found for each in row.hash_ids]
    assert len(set(ids)) == len(ids)


def test_burstgpt_files_without_session_columns_have_no_sessions() -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
    (row,) = read(text.encode())
    assert (row.timestamp_ms, row.session, row.input_length, row.output_length) == (5000, "", 472, 18)


# Bailian

BLOCK_IDS = st.integers(0, 3)


@st.composite
def bailian_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for chat in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, 1200))
        parent = draw(st.sampled_from([-1, *range(chat)])) if chat else -1
        ids = [draw(BLOCK_IDS) if draw(st.integers(0, 9)) == 0 else 0 for _ in range(-(-length // 16))]
        rows.append(
            {
                "chat_id": chat,
                "parent_chat_id": parent,
                "timestamp": draw(st.integers(0, 10**7)) / 1000,
                "input_length": length,
                "output_length": draw(OUTPUTS),
                "type": "text",
                "turn": 1 if parent == -1 else 2,
                "hash_ids": ids,
            }
        )
    return rows


@given(bailian_rows(), st.sampled_from([0, 512]))
def test_bailian_prompts_share_exactly_their_common_blocks(rows: list[dict[str, Any]], block_tokens: int) -> None:
    found, size = read(json_lines(rows), block_tokens=block_tokens), block_tokens or 16
    for row, given_row in zip(found, rows, strict=True):
        assert row.timestamp_ms == round(1000 * given_row["timestamp"])
        assert (row.input_length, row.output_length) == (given_row["input_length"], given_row["output_length"])
        assert len(row.hash_ids) == -(-row.input_length // size)
        assert len(set(row.hash_ids)) == len(row.hash_ids)
    prompts = [
        [(each, i) for each in row["hash_ids"] for i in range(16)][: row["input_length"]] for row in rows
    ]  # tokens
    for (a, tokens_a), (b, tokens_b) in pairwise(zip(found, prompts, strict=True)):
        blocks_a, blocks_b = ([each[i : i + size] for i in range(0, len(each), size)] for each in (tokens_a, tokens_b))
        same = next(
            (i for i, (x, y) in enumerate(zip(blocks_a, blocks_b, strict=False)) if x != y),
            min(len(blocks_a), len(blocks_b)),
        )
        assert shared(a, b) == same


@given(bailian_rows())
def test_a_bailian_session_is_named_by_its_first_chat(rows: list[dict[str, Any]]) -> None:
    parents = {row["chat_id"]: row["parent_chat_id"] for row in rows}
    for row, given_row in zip(read(json_lines(rows)), rows, strict=True):
        first = given_row["chat_id"]
        while parents[first] != -1:
            first = parents[first]
        assert row.session == str(first)


def test_a_bailian_chat_whose_parent_is_not_in_the_file_belongs_to_it() -> None:
    found = read((DATA / "bailian.jsonl").read_bytes())
    assert [row.session for row in found] == ["40", "40", "9", "40"]


# Mooncake

MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "session": "a"},
    {"timestamp": 9, "input_length": 1030, "output_length": 0, "hash_ids": [0, 2, 3]},
]


def test_mooncake_rows_are_kept() -> None:
    assert read(json_lines(MOONCAKE)) == [
        TraceRow(0, 0, 600, 5, (0, 1), "a"),
        TraceRow(1, 9, 1030, 0, (0, 2, 3)),
    ]


def test_mooncake_rows_of_another_block_size_are_divided_anew() -> None:
    rows = [
        {"timestamp": 0, "input_length": 70, "output_length": 1, "hash_ids": [0, 1, 2, 3, 4]},
        {"timestamp": 1, "input_length": 64, "output_length": 1, "hash_ids": [0, 1, 2, 9]},
    ]
    a, b = read(json_lines(rows), source_block_tokens=16, block_tokens=32)
    assert (len(a.hash_ids), len(b.hash_ids), shared(a, b)) == (3, 2, 1)


# ShareGPT

MESSAGES = st.lists(st.tuples(st.sampled_from(["human", "gpt", "system"]), st.text(max_size=40)), max_size=8)


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.integers(8, 64))
def test_sharegpt_answers_become_requests_with_all_that_was_said_before(
    conversations: list[list[tuple[str, str]]], block_tokens: int
) -> None:
    data = json.dumps(
        [
            {"id": f"c{i}", "conversations": [{"from": sender, "value": text} for sender, text in each]}
            for i, each in enumerate(conversations)
        ],
        indent=1,
    )
    source = TraceSource(io.BytesIO(data.encode()), "t", AUTO, SourceSettings(block_tokens=block_tokens))
    found = list(source.rows())
    expected = []
    for i, each in enumerate(conversations):
        said, asked = b"", False
        for sender, text in each:
            if sender == "gpt" and asked and text:
                expected.append((f"c{i}", said, len(text.encode())))
            said += text.encode()
            asked = sender != "gpt" and bool(said)
    assert [(row.session, row.input_length, row.output_length) for row in found] == [
        (session, len(prompt), output) for session, prompt, output in expected
    ]
    for row, (_, prompt, _) in zip(found, expected, strict=True):
        blocks = PromptBlocks(block_tokens)
        blocks.append_tokens(list(prompt))
        assert row.hash_ids == blocks.ids()
    assert all(a.timestamp_ms < b.timestamp_ms for a, b in pairwise(found) if a.session == b.session)


def test_sharegpt_times_follow_from_the_settings() -> None:
    data = (DATA / "sharegpt.json").read_bytes()
    first, second, other = read(data, think_time_s=3, output_rate=10)
    assert (first.session, first.timestamp_ms) == (second.session, 0) == ("garden_0", 0)
    assert second.timestamp_ms == 3000 + 100 * first.output_length
    assert other.timestamp_ms > 0
    assert read(data, seed=1)[2].timestamp_ms != other.timestamp_ms == read(data)[2].timestamp_ms


# AIPerf


@given(st.lists(st.tuples(st.sampled_from("abc"), TOKENS, OUTPUTS), min_size=1, max_size=12))
def test_aiperf_turns_contain_the_conversation_so_far(turns: list[tuple[str, int, int]]) -> None:
    rows = [
        {
            "session_id": session,
            "input_length": added,
            "output_length": output,
            "hash_ids": list(range(i * 10, i * 10 + -(-added // 512))),
        }
        for i, (session, added, output) in enumerate(turns)
    ]
    found = read(json_lines(rows))
    last: dict[str, TraceRow] = {}
    for row, (session, added, output) in zip(found, turns, strict=True):
        before = last.get(session)
        history = before.input_length + before.output_length if before else 0
        assert (row.session, row.input_length, row.output_length) == (session, history + added, output)
        if before:
            assert shared(before, row) >= before.input_length // 512
            assert row.timestamp_ms >= before.timestamp_ms
        last[session] = row


def test_aiperf_agents_share_blocks_by_their_ids() -> None:
    found = read((DATA / "aiperf.jsonl").read_bytes(), output_rate=100, output_tokens=7)
    agent, other, later = found[0], found[1], found[2]
    assert shared(agent, other) == 2
    assert (shared(agent, later), later.input_length) == (3, 1536 + 320 + 768)
    assert later.timestamp_ms == 0 + 3200 + 2450
    first, second = (row for row in found if row.session == "chat-1")
    system, question, next_question = "Answer in one sentence.", "What is a lease?", "Who ends it?"
    assert (first.input_length, first.output_length) == (len(system + question), 20)
    assert (second.input_length, second.output_length) == (len(system + question) + 20 + len(next_question), 7)
    assert [row.timestamp_ms for row in found[-3:]] == [4000, 5000, 6000]


@pytest.mark.parametrize("mode", ["message_array_with_responses", "deltas_with_responses", "deltas_without_responses"])
def test_the_context_mode_of_aiperf_says_what_a_turn_contains(mode: str) -> None:
    rows = [
        {"session_id": "s", "timestamp": 0, "input_length": length, "output_length": 50, "context_mode": mode}
        for length in (100, 700)
    ]
    lengths = {"message_array_with_responses": 700, "deltas_with_responses": 800, "deltas_without_responses": 850}
    assert [row.input_length for row in read(json_lines(rows))] == [100, lengths[mode]]


def test_aiperf_messages_are_histories_or_additions() -> None:
    one = {"role": "user", "content": "a" * 40}
    two = {"role": "assistant", "content": "b" * 40}
    history = [{"session_id": "s", "messages": [one]}, {"session_id": "s", "messages": [one, two, one]}]
    additions = [{"session_id": "s", "messages": [one], "message_mode": "delta", "output_length": 5}] * 2
    first, second = read(json_lines(history), block_tokens=16)
    assert (first.input_length, second.input_length) == (44, 44 + 49 + 44)
    assert shared(first, second) == 2
    assert [row.input_length for row in read(json_lines(additions))] == [44, 93]


def test_aiperf_lines_of_the_same_text_share_it_and_unknown_inputs_share_nothing() -> None:
    rows = [{"text": "x" * 600}, {"texts": ["x" * 300, {"name": "t", "contents": ["x" * 300]}]}]
    a, b = read(json_lines(rows))
    assert a.hash_ids == b.hash_ids
    a, b = read(json_lines([{"input_length": 600}] * 2))
    assert shared(a, b) == 0


# Weka

WEKA = json.loads((DATA / "weka.json").read_text())


def test_requests_of_an_agent_and_its_sub_agents_share_their_blocks() -> None:
    main, nested, unknown, later = read((DATA / "weka.json").read_bytes(), block_tokens=64)
    assert [row.timestamp_ms for row in (main, nested, unknown, later)] == [0, 12_500, 16_750, 31_000]
    assert [row.session for row in (main, nested, later)] == ["trace_0001", "trace_0001/agent_001", "trace_0001"]
    assert (shared(main, nested), shared(main, later), shared(main, unknown)) == (8, 17, 0)
    assert (later.input_length, later.output_length, len(later.hash_ids)) == (1400, 12, 22)


def test_nested_times_may_begin_with_the_agent() -> None:
    absolute = json.loads(json.dumps(WEKA))
    for request in absolute["requests"][1]["requests"]:
        request["t"] += 12.5
    assert read(json.dumps(absolute).encode()) == read(json.dumps(WEKA).encode())


def test_several_agents_may_follow_each_other_and_share_nothing() -> None:
    data = json.dumps(WEKA, indent=1) + "\n" + json.dumps(WEKA | {"id": "trace_0002"})
    found = read(data.encode())
    assert [row.session for row in found[::4]] == ["trace_0001", "trace_0002"]
    assert shared(found[0], found[4]) == 0
    assert found[4].timestamp_ms > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"hash_id_scope": "local"', '"hash_id_scope": "global"', "trace 0: found hash_id_scope 'global'"),
        ('"in": 700', '"in": 640', "trace 0, request 1, request 0: found 11 hash_ids for 640 tokens"),
        ('"type": "n",\n   "model": "m",\n   "in": 1400', '"type": "x",\n   "in": 1400', "request 2: found type 'x'"),
        ('"t": 31.0', '"t": "soon"', "request 2: found t 'soon'"),
        ('"block_size": 64', '"block_size": 0', "block_size 0"),
    ],
)
def test_damaged_agents_are_named_with_their_request(old: str, new: str, message: str) -> None:
    text = (DATA / "weka.json").read_text()
    assert old in text
    with pytest.raises(TraceFormatError) as caught:
        read(text.replace(old, new, 1).encode())
    assert message in str(caught.value)


# Problems

VALID: dict[str, bytes] = {
    "azure": (DATA / "azure.csv").read_bytes(),
    "burstgpt": (DATA / "burstgpt.csv").read_bytes(),
    "bailian": (DATA / "bailian.jsonl").read_bytes(),
    "aiperf": (DATA / "aiperf.jsonl").read_bytes(),
    "mooncake": json_lines(MOONCAKE * 2),
}
DAMAGES: list[tuple[str, str, str, str]] = [
    # format, what is replaced, by what, what the message says
    ("azure", "1500,10", "1500", "2 columns"),
    ("azure", ",512,", ",5e2,", "ContextTokens '5e2'; expected an integer from 1"),
    ("azure", ",512,0", ",0,0", "ContextTokens '0'"),
    ("azure", "18:01:02", "18:61:02", "TIMESTAMP '2023-11-16 18:61:02"),
    ("azure", "2023-11-16 18:01:02.0099300", "16/11/2023", "expected a date and time"),
    ("burstgpt", "700,30,730", "700,30,731", "Total tokens 731; expected 730"),
    ("burstgpt", "5271.0", "nan", "Timestamp 'nan'; expected a number of seconds"),
    ("burstgpt", "33,12,45", "33,-12,21", "Response tokens '-12'"),
    ("bailian", '"timestamp": 70.5', '"timestamp": "70.5s"', "timestamp '70.5s'"),
    ("bailian", '"parent_chat_id": 9, ', "", "no 'parent_chat_id'"),
    ("bailian", "[7, 7]", "[7]", "1 hash_ids for an input_length of 20; expected 2"),
    ("bailian", "[7, 7]", "[7, -7]", "a list of non-negative integers"),
    ("bailian", '"turn": 4', '"turn": true', "turn True"),
    ("aiperf", '"delay": 2450.3', '"delay": -1', "delay -1; expected a number of milliseconds"),
    ("aiperf", "[1000, 1001]", "[1000]", "1 hash_ids for an input_length of 768; expected 2"),
    ("aiperf", '{"text": "Who ends it?"', '{"image": "a.png", "text": "?"', "turn 2: found image"),
    ("aiperf", '"text": "What is a lease?", ', "", "either text or texts"),
    ("aiperf", '{"timestamp": 6000, "input_length"', '{"payload": {}, "input_length"', "expected exactly one of"),
    ("aiperf", '{"type": "text", "text": "empty"}', '{"type": "image_url"}', "message 2: found content"),
    ("aiperf", '"role": "user"', '"role": 1', "role 1; expected a string"),
    ("mooncake", '"timestamp": 9', '"timestamp": null', "timestamp None"),
    ("mooncake", '"session": "a"', '"session": 1', "session 1"),
]


@pytest.mark.parametrize(("format_name", "old", "new", "message"), DAMAGES)
def test_a_damaged_record_is_named_with_its_line(format_name: str, old: str, new: str, message: str) -> None:
    text = VALID[format_name].decode()
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(TraceFormatError) as caught:
        read(text.replace(old, new, 1).encode(), format_name)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"t, line {line}")
    assert message in str(caught.value)


@pytest.mark.parametrize("format_name", VALID)
@given(data=st.data())
def test_a_record_cut_anywhere_is_named_and_the_others_are_read(format_name: str, data: st.DataObject) -> None:
    lines = VALID[format_name].split(b"\n")
    is_csv = format_name in ("azure", "burstgpt")
    at = data.draw(st.integers(int(is_csv), len([line for line in lines if line]) - 1))
    # Cut before the last comma: a column or a field is missing.
    lines[at] = lines[at][: data.draw(st.integers(1, lines[at].rindex(b",")))]
    problems: list[TraceFormatError] = []
    source = TraceSource(io.BytesIO(b"\n".join(lines)), "t", format_name, SourceSettings())
    list(source.rows(problems.append))
    assert [each.line for each in problems] == [at + 1]


SHAREGPT = (DATA / "sharegpt.json").read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"gpt",\n    "value": "Mint', '"cat",\n    "value": "Mint', "conversation 0, message 3"),
        ('"conversations": []', '"conversations": 5', "conversation 1: found conversations 5"),
        ('"value": "Thanks, then fill it at nine."', '"value": null', "conversation 2, message 1: found value None"),
        ('"id": "empty_0"', '"id" "empty_0"', "line 24: found "),
        ("]\n }\n]", "]\n }", "the end of the file"),
        ('"tail_3"', '"tail_3', "expected a complete JSON value"),
    ],
)
def test_damaged_conversations_are_named_with_index_and_line(old: str, new: str, message: str) -> None:
    text = SHAREGPT.decode()
    assert old in text
    with pytest.raises(TraceFormatError) as caught:
        read(text.replace(old, new, 1).encode(), "sharegpt")
    assert message in str(caught.value)


@given(st.sampled_from(sorted(FORMATS)), st.binary(max_size=300))
def test_any_bytes_are_requests_or_a_trace_error(format_name: str, data: bytes) -> None:
    with suppress(TraceError):
        read(data, AUTO)
    with suppress(TraceError):
        read(data, format_name)


@given(st.sampled_from(sorted(VALID)), st.data())
def test_any_change_of_a_file_leaves_sound_rows_or_a_trace_error(format_name: str, data: st.DataObject) -> None:
    text = bytearray(VALID[format_name])
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'0123456789-,.:"[]{}\n eE'))
    with suppress(TraceError):
        for row in read(bytes(text), format_name):
            assert len(row.hash_ids) == -(-row.input_length // 512)
            assert row.output_length >= 0


# Detection


@pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.name)
def test_the_format_is_detected(path: Path) -> None:
    with path.open("rb") as raw:
        assert detect_format(raw, "t") == path.stem


def test_plain_rows_are_mooncake_s_and_rows_of_a_session_aiperf_s() -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}
    assert detect_format(io.BytesIO(json_lines([row])), "t") == "mooncake"
    assert detect_format(io.BytesIO(json_lines([row | {"session": "a"}])), "t") == "mooncake"
    assert detect_format(io.BytesIO(json_lines([row | {"session_id": "a"}])), "t") == "aiperf"


@pytest.mark.parametrize("data", [b"a,b,c\n1,2,3\n", b'{"conversations": []}\n', b"{broken\n", b"hello"])
def test_an_unknown_format_names_the_flag(data: bytes) -> None:
    with pytest.raises(FormatUnknown, match=r"line 1, .*--format"):
        read(data)


def test_an_empty_file_and_a_wrong_format_are_refused() -> None:
    with pytest.raises(TraceFormatError, match="an empty file"):
        read(b"\n\n")
    with pytest.raises(TraceFormatError, match="no request"):
        read(AZURE_HEADER.encode(), "azure")
    with pytest.raises(TraceFormatError, match="line 1: found the header"):
        read(VALID["burstgpt"], "azure")
    with pytest.raises(FormatUnknown, match="unknown format 'csv'; expected auto, azure"):
        read(VALID["azure"], "csv")


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("session_rate", 0.0, "--session-rate"),
        ("think_time_s", -1.0, "--think-time"),
        ("output_rate", float("inf"), "--output-rate"),
        ("output_tokens", -1, "--output-tokens"),
        ("source_block_tokens", -16, "--block-tokens"),
    ],
)
def test_bad_settings_name_their_flag(setting: str, value: float, flag: str) -> None:
    change: Callable[..., SourceSettings] = SourceSettings
    with pytest.raises(BadSourceSettings, match=flag):
        change(**{setting: value})
