"""Reference pages, generated from the code: options of commands, configuration, HTTP, errors, values of the chart."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MARKUP = re.compile(r"\[/?(?:bold|dim|italic|cyan|green|red|yellow)[^\]]*\]")


def commands() -> str:
    """Return the options of every command that `moonpool --help` shows."""
    from moonpool.cli import app
    from moonpool.commands.lazy import every_command

    parts = [
        "# Options of all commands",
        "As `--help` prints them. Options of one role are [settings](configuration.md).",
    ]
    for path, command in sorted(every_command(app, with_hidden=False).items()):
        parts += [f"## moonpool {path}", _paragraphs(command.help or "")]
        rows = [
            row for parameter in command.params if not getattr(parameter, "hidden", False) if (row := _row(parameter))
        ]
        if rows:
            parts.append(_table(("option", "default", ""), rows))
    return "\n\n".join(parts) + "\n"


def configuration() -> str:
    """Return every setting: its key in the file, its flag, its variable and its default."""
    from moonpool.config import all_settings

    parts = [
        "# Configuration",
        "Every setting has a key in the YAML file of `--config`, a flag and an environment variable; flags precede "
        "variables, and these the file. [Operations](../operations.md#configuration) explains the file.",
    ]
    settings = sorted(all_settings().values(), key=lambda setting: setting.panel)
    for panel, group in groupby(settings, key=lambda setting: setting.panel):
        rows = [
            (f"`{each.name}`", f"`{each.flag}`", f"`{each.variable}`", each.default_text, _help(each))
            for each in sorted(group, key=lambda setting: setting.name)
        ]
        parts += [f"## {panel}", _table(("key", "flag", "variable", "default", ""), rows)]
    return "\n\n".join(parts) + "\n"


def http() -> str:
    """Return the endpoints with the fields of their bodies; the same is served as /openapi.json."""
    from frontend.api.openapi import describe

    document = describe(asks_for_key=True)
    parts = [
        "# HTTP",
        "The endpoints as `/openapi.json` describes them. [The API](../api.md) explains extensions, errors and limits.",
    ]
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            if method not in ("get", "post", "put", "delete"):  # parameters of all methods
                continue
            parts += [f"## {method.upper()} {path}", _paragraphs(call.get("description") or call.get("summary", ""))]
            body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if "$ref" in body:
                name = body["$ref"].rsplit("/", 1)[1]
                fields = document["components"]["schemas"][name].get("properties", {})
                parts.append(_table(("field", "type"), [(f"`{key}`", _kind(field)) for key, field in fields.items()]))
    return "\n\n".join(part for part in parts if part) + "\n"


def helm() -> str:
    """Return the chart's values."""
    text = (ROOT / "deploy" / "helm" / "moonpool" / "README.md").read_text(encoding="utf-8")
    values = text[text.index("## Values") :].partition("\n")[2].strip()
    return f"# Helm values\n\n[Kubernetes](../install.md) describes an installation.\n\n{values}\n"


_ERRORS = (
    *("frontend", "conductor", "worker", "kvpool", "messenger", "engine", "rpc"),
    *("moonpool", "loadtest", "traces", "simulator", "telemetry"),
)


def errors() -> str:
    """Return the named errors: those of the HTTP API with status and code, then those of each package."""
    from frontend.errors import ApiError

    parts = [
        "# Errors",
        "Every failure that Moonpool foresees has a named error, whose message says what was wrong, what was expected "
        "and what to do. [The API](../api.md#errors) lists the codes that clients get; logs and commands use the names "
        "below.",
    ]
    for package in _ERRORS:
        module = importlib.import_module(f"{package}.errors")
        found = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, Exception)]
        own = [each for each in found if each.__module__ == module.__name__]
        rows = [(f"`{each.__name__}`", _status(each, ApiError), _first(each)) for each in own]
        parts += [f"## {package}", _table(("error", "HTTP", ""), rows)]
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands,
    "reference/configuration.md": configuration,
    "reference/http.md": http,
    "reference/helm.md": helm,
    "reference/errors.md": errors,
}


def _row(parameter: Any) -> tuple[str, str, str] | None:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`", "", _cell(getattr(parameter, "help", "") or "")
    if "--help" in parameter.opts:
        return None
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else parameter.default
    text = "" if default in (None, False, (), "") or callable(default) else str(default)
    return names, text, _cell(parameter.help or "")


def _help(setting: Any) -> str:
    choices = f" One of {', '.join(f'`{each}`' for each in setting.choices)}." if setting.choices else ""
    return _cell(setting.key.help) + choices


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(each) for each in field["anyOf"]))
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[1]
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _status(error: type[Exception], api: type[Exception]) -> str:
    found: Any = error
    return f"{found.status} `{found.kind}`" if issubclass(error, api) else ""


def _first(error: type[Exception]) -> str:
    """Return the error's docstring as one line."""
    return " ".join((inspect.getdoc(error) or "").split())


def _paragraphs(text: str) -> str:
    return _MARKUP.sub("", inspect.cleandoc(text)).replace("\f", "")


def _cell(text: str) -> str:
    return _MARKUP.sub("", " ".join(text.split())).replace("|", "\\|").replace("<", "&lt;")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
