"""The shipped folder is what its users expect."""

import json
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, LlamaForCausalLM


def test_the_folder_is_complete_and_small(bundled: Path) -> None:
    names = {path.name for path in bundled.iterdir()}
    weights = {"config.json", "generation_config.json", "model.safetensors"}
    texts = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "LICENSE", "NOTICE"}
    assert weights | texts <= names
    assert (bundled / "model.safetensors").stat().st_size < 8_000_000
    settings = json.loads((bundled / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["model_max_length"]) == ("PreTrainedTokenizerFast", 4096)


def test_transformers_loads_it_and_runs_the_last_position(bundled: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(bundled, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.randint(6, 2048, (1, 4096), generator=torch.Generator().manual_seed(1))).logits
    assert logits.shape == (1, 4096, 2048)
    assert torch.isfinite(logits).all()


def test_a_chat_is_rendered_with_one_bos_and_role_markers(bundled: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be brief.<|eos|><|user|>Hello.<|eos|><|assistant|>"
    assert tokenizer(text, add_special_tokens=False).input_ids[:2] == [0, 3]
    assert tokenizer("Hello.").input_ids[0] == 0


def test_an_unknown_role_is_an_error(bundled: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    with pytest.raises(TemplateError, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_decoding_gives_the_text_back(bundled: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    text = "The number of Mira is 41.\n    return {'naïve': 3.14}  # ✓"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
