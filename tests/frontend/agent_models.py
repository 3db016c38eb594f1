"""Model folders with the markers and chat templates of model families, made from the tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import common_pb2, worker_pb2

END = 3  # id of the token that ends an answer

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_THOUGHT = "{% if m.reasoning_content is defined %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
TEMPLATES = {
    # The model opens the reasoning; with enable_thinking false the prompt closes it.
    "qwen3": _TOOLS
    + "{# <tool_call> #}"
    + _TURNS.replace("{{ m.content }}", _THOUGHT + "{{ m.content }}")
    + _OPENING
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    # The prompt opens the reasoning.
    "deepseek": _TURNS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    + _OPENING
    + "<think>\n{% endif %}",
    "qwen3_coder": _TOOLS + "{# <tool_call><function=NAME><parameter=KEY> #}" + _TURNS + _OPENING + "{% endif %}",
    "llama3": _TOOLS
    + '{# {"name": function name, "parameters": dictionary of argument name and its value} #}'
    + _TURNS
    + _OPENING
    + "{% endif %}",
    "mistral": _TOOLS
    + "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}"
    + "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}",
    "mistral_named": _TOOLS
    + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "harmony": _TOOLS
    + "{% for m in messages %}<|start|>{{ m.role }}"
    + "{% if m.thinking is defined %}<|channel|>analysis<|message|>{{ m.thinking }}{% endif %}"
    + "<|message|>{{ m.content }}<|end|>{% endfor %}{# message.thinking #}"
    + "{# <|channel|>analysis #}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}
TEMPLATES["llama3_single"] = TEMPLATES["llama3"] + "{# This model only supports single tool-calls at once! #}"
TEMPLATES["mistral_spaced"] = TEMPLATES["mistral"].replace("[TOOL_CALLS]", "[TOOL_CALLS] [")
TEXT_MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # shown even if special tokens are skipped
SPECIAL_MARKERS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
HARMONY_MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]


def make_model(base: Path, path: Path, family: str) -> Path:
    """Return a folder with the vocabulary of `base`, all markers as tokens, and the family's chat template."""
    shutil.copytree(base, path)
    fast = FastTokenizer.from_file(str(base / "tokenizer.json"))
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_MARKERS])
    fast.add_special_tokens([*SPECIAL_MARKERS, *HARMONY_MARKERS])
    fast.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": fast.get_vocab_size()}))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATES[family]}))
    return path


class AgentModel:
    """A served model with the markers of its family: what the cluster answers, and what its grammars allow."""

    def __init__(self, path: Path, cluster: Any) -> None:
        self.tokenizer = Tokenizer(path)
        self._cluster = cluster
        self._vocabulary = LLTokenizer(
            (path / "tokenizer.json").read_text(), eos_token=END, n_vocab=self.tokenizer.vocab_size
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def answers(self, text: str, finish: int = worker_pb2.FINISH_STOP) -> list[worker_pb2.Submit]:
        """Let the cluster answer with `text`; return the list of what it will be asked for."""
        seen: list[worker_pb2.Submit] = []

        def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
            seen.append(submit)
            return self.ids(text) + ([END] if finish == worker_pb2.FINISH_STOP else []), finish

        self._cluster.answer_with(answer)
        return seen

    def prompt(self, submit: worker_pb2.Submit) -> str:
        """Return the prompt of a request as text."""
        ids = [int.from_bytes(submit.prompt_ids[at : at + 4], "little") for at in range(0, len(submit.prompt_ids), 4)]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def accepts(self, submit: worker_pb2.Submit, text: str) -> bool:
        """Return True if the request's grammar accepts a whole answer, in this model's tokens."""
        grammar = submit.sampling.grammar
        assert grammar.kind == common_pb2.Grammar.KIND_LARK
        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(grammar.source), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(self.ids(text)) and matcher.is_accepting()
