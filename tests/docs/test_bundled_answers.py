"""The bundled model answers every example that README and quick start ask it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from settings.worker import BUNDLED_MODEL
from tools.training.export import load

ROOT = Path(__file__).parents[2]
_REQUEST = re.compile(r"-d '(\{.*?\})'$", re.MULTILINE | re.DOTALL)
_ANSWER = re.compile(r'The answer is "(.*?)"')


def examples() -> list[tuple[str, dict[str, Any], str]]:
    """Return (page, body, answer) of every chat in the pages that is sent with curl; the answer stands after it."""
    found = []
    for page in ("README.md", "docs/quickstart.md"):
        text = (ROOT / page).read_text()
        for request in _REQUEST.finditer(text):
            body = json.loads(request[1].replace("'\\''", "'"))
            if "messages" in body:
                answer = _ANSWER.search(text, request.end())
                assert answer, f"{page} does not say what the answer to {body} is"
                found.append((page, body, answer[1]))
    return found


@torch.no_grad()
def answer_to(body: dict[str, Any]) -> str:
    """Return the bundled model's greedy answer."""
    model, tokenizer = load(BUNDLED_MODEL), AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
    ids = prompt = tokenizer(text, add_special_tokens=False).input_ids
    for _ in range(64):
        following = int(model(torch.tensor([ids]))[0, -1].argmax())
        if following == tokenizer.eos_token_id:
            break
        ids = [*ids, following]
    return str(tokenizer.decode(ids[len(prompt) :]))


def test_both_pages_have_examples() -> None:
    assert {page for page, _, _ in examples()} == {"README.md", "docs/quickstart.md"}


@pytest.mark.parametrize(("page", "body", "answer"), examples())
def test_every_example_is_answered_as_the_page_says(page: str, body: dict[str, Any], answer: str) -> None:
    assert body["temperature"] == 0
    assert answer_to(body) == answer
