"""Reasoning parsers: what is reasoning and what is content, however the text is split into pieces."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.reasoning import DEEPSEEK_R1, HARMONY, QWEN3, ParsedText, ReasoningFormat, ReasoningStart

INSIDE, BEFORE, AFTER = ReasoningStart.INSIDE, ReasoningStart.BEFORE, ReasoningStart.AFTER
WITHIN_CONTENT = ReasoningStart.WITHIN_CONTENT
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
LEFT_CALL = "<|channel|>commentary to=functions.look<|message|>"


def parse(form: ReasoningFormat, start: ReasoningStart, pieces: list[str]) -> ParsedText:
    """Return what a parser makes of an answer that comes in pieces."""
    parser = form.parser(start)
    parsed = [parser.feed(piece, is_last=at == len(pieces)) for at, piece in enumerate(pieces, start=1)]
    return ParsedText("".join(each.reasoning for each in parsed), "".join(each.content for each in parsed))


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (BEFORE, "<think>\nwhy\n</think>\n\nso", "why", "so"),
        (BEFORE, " \n<think>why</think>so", "why", "so"),
        (BEFORE, "so <think>why</think>", "", "so <think>why</think>"),
        (BEFORE, "no tag </think> here", "", "no tag </think> here"),
        (BEFORE, "<think>a\n\nb <thin </thi\n", "a\n\nb <thin </thi\n", ""),
        (BEFORE, "<think></think>so", "", "so"),
        (BEFORE, "<thin", "", "<thin"),
        (BEFORE, " \n", "", " \n"),
        (INSIDE, "why\n</think>\n\nso\n</think>", "why", "so\n</think>"),
        (INSIDE, "<think>\nwhy</think>so", "why", "so"),
        (INSIDE, "why </", "why </", ""),
        (INSIDE, "</think>so", "", "so"),
        (AFTER, "<think>so</think>", "", "<think>so</think>"),
    ],
)
def test_think_tags_and_line_breaks_next_to_them_are_neither(
    start: ReasoningStart, text: str, reasoning: str, content: str
) -> None:
    assert parse(QWEN3, start, [text]) == ParsedText(reasoning, content)


def test_where_an_answer_begins_follows_from_the_end_of_its_prompt() -> None:
    assert [QWEN3.start_of(ending) for ending in ("<|assistant|>", "<think>\n", "<think>\n\n</think>\n\n")] == [
        BEFORE,
        INSIDE,
        AFTER,
    ]
    assert DEEPSEEK_R1.start_of("<|assistant|>") is INSIDE
    assert DEEPSEEK_R1.start_of("</think>") is AFTER
    assert QWEN3.start_in("<think>a</think>b <think>c") is INSIDE
    assert QWEN3.start_in("<think>a</think>b") is AFTER
    assert DEEPSEEK_R1.start_in("so") is AFTER


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}why{NEXT}{FINAL}so<|return|>", "why", "so"),
        (f"{ANALYSIS}why{NEXT}{ANALYSIS}because{NEXT}{COMMENTARY}wait{NEXT}{FINAL}so", "why\nbecause", "wait\nso"),
        (f"{ANALYSIS}why{NEXT}{CALL}{{}}<|call|>", "why", f"{LEFT_CALL}{{}}<|call|>"),
        (
            "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}",
            "",
            f"{LEFT_CALL}{{}}",
        ),
        (f"{ANALYSIS}why", "why", ""),
        ("<|channel|>anal", "", ""),
        (f"{ANALYSIS}why{NEXT}<|channel|>fin", "why", ""),
        (f"{FINAL}so{NEXT}<|channel|>commentary to=functions.look <|constrain|>js", "", "so"),
        (f"so {FINAL}", "", f"so {FINAL}"),
        (f"{FINAL}so<|end|>more", "", "somore"),
        ("<|channel|>" + "x" * 300 + "<|message|>so", "", "<|channel|>" + "x" * 300 + "<|message|>so"),
        ("<|sta", "", "<|sta"),
    ],
)
def test_the_channel_analysis_is_reasoning_and_what_is_no_message_is_content(
    text: str, reasoning: str, content: str
) -> None:
    assert parse(HARMONY, BEFORE, [text]) == ParsedText(reasoning, content)


def test_a_message_that_continues_content_has_no_header() -> None:
    assert parse(HARMONY, WITHIN_CONTENT, ["so<|return|>"]) == ParsedText("", "so")
    assert parse(HARMONY, WITHIN_CONTENT, [f"so{NEXT}{CALL}{{}}<|call|>"]) == ParsedText(
        "", f"so{LEFT_CALL}{{}}<|call|>"
    )
    assert parse(HARMONY, WITHIN_CONTENT, [f"so{NEXT}{ANALYSIS}why{NEXT}{FINAL}so"]) == ParsedText("why", "so\nso")


def pieces_of(fragments: list[str]) -> st.SearchStrategy[tuple[str, list[str]]]:
    """Texts of these fragments, and each of them in pieces."""

    def split(text: str) -> st.SearchStrategy[tuple[str, list[str]]]:
        cuts = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)
        return cuts.map(lambda at: (text, [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]))

    return st.lists(st.sampled_from(fragments), max_size=9).map("".join).flatmap(split)


@given(
    pieces_of(["<think>", "</think>", "\n", " ", "<", "</", "thi", "nk>", "why", "so"]),
    st.sampled_from([*ReasoningStart]),
)
def test_think_tags_are_found_however_the_text_is_split(split: tuple[str, list[str]], start: ReasoningStart) -> None:
    text, pieces = split
    whole = parse(QWEN3, start, [text])
    assert parse(QWEN3, start, pieces) == whole
    assert parse(QWEN3, start, [*text, ""]) == whole
    # Only one pair of tags and white space next to it are dropped.
    reasoning, content = re.escape(whole.reasoning), re.escape(whole.content)
    assert re.fullmatch(rf"\s*(<think>)?\n*{reasoning}\n*(</think>)?\n*{content}", text)


@given(
    pieces_of([ANALYSIS, FINAL, COMMENTARY, CALL, NEXT, "<|start|>", "<|end|>", "<|call|>", "<|", "SO", "\n", "x" * 99])
)
def test_channels_are_found_however_the_text_is_split(split: tuple[str, list[str]]) -> None:
    text, pieces = split
    whole = parse(HARMONY, BEFORE, [text])
    assert parse(HARMONY, BEFORE, pieces) == whole
    assert parse(HARMONY, BEFORE, [*text, ""]) == whole
    if "<|start|>" not in text:  # before a channel, it begins a header
        assert (whole.reasoning + whole.content).count("SO") == text.count("SO")


def test_reasoning_is_returned_as_it_comes() -> None:
    parser = QWEN3.parser(BEFORE)
    assert parser.feed("<think>", is_last=False) == ParsedText("", "")
    assert parser.in_reasoning
    assert parser.feed("\nwhy </", is_last=False) == ParsedText("why ", "")
    assert parser.feed("a\n", is_last=False) == ParsedText("</a", "")
    assert parser.feed("</think>so", is_last=False) == ParsedText("", "so")
    assert not parser.in_reasoning
