"""Rendering a chat to the text the model was trained on, with the template that came with it (as transformers does)."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.errors import InvalidRequest, ModelFolderError


class ChatTemplate:
    """A compiled template. Sandboxed: it comes with the weights, from wherever those came.

    `takes_tools`: whether it looks at the variable `tools`.
    """

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelFolderError(f"chat template of {origin} does not compile: {error}") from error
        self._variables = dict(variables)

    @classmethod
    def find(cls, path: Path, settings: Mapping[str, Any]) -> "ChatTemplate | None":
        """The folder's template: chat_template.jinja, or the one in tokenizer_config.json; None where there is none."""
        file = path / "chat_template.jinja"
        source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
        if isinstance(source, list):  # several under names
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelFolderError(f"chat_template of {path} is no text")
        variables = {name: text for name, value in settings.items() if (text := _token_text(name, value)) is not None}
        return cls(source, variables, str(path))

    def render(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """The chat as text; `extra` are variables of the client's. What the template refuses raises InvalidRequest."""
        variables = {**self._variables, "tools": None, "documents": None, **extra}
        try:
            return self._template.render(
                variables | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except (
            *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
            RecursionError,  # arguments of calls, and variables, may be nested
        ) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages") from (
                error
            )


def _token_text(name: str, value: object) -> str | None:
    """Templates may use bos_token, eos_token and their like, which are texts or objects with the text inside."""
    if not name.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
