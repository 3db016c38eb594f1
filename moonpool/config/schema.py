"""JSON Schema of the configuration file, for editors, and of single settings, for the Helm chart."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moonpool.config.models import ModelEntry, model_settings
from moonpool.config.roles import all_settings
from settings.keys import Setting, parse_size

_TYPES = {int: "integer", float: "number", bool: "boolean"}


def setting_schema(declared: Setting) -> dict[str, Any]:
    """Return the schema of one setting's value: type, choices and range."""
    schema: dict[str, Any] = {"description": declared.key.help}
    if declared.kind is tuple:
        return {**schema, "type": "array", "items": {"type": "string"}}
    schema["type"] = _TYPES.get(declared.kind, "string")
    if declared.key.parse is parse_size:
        return {**schema, "type": ["integer", "string"]}
    if declared.choices:
        schema["enum"] = list(declared.choices)
    if declared.key.none_word:
        schema |= {"type": [schema["type"], "string"], "pattern": f"^{declared.key.none_word}$"}
    bounds = {"minimum": declared.key.low, "maximum": declared.key.high}
    return schema | {name: bound for name, bound in bounds.items() if bound is not None}


def file_schema() -> dict[str, Any]:
    """Return the schema of the whole file (JSON Schema, draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of Moonpool",
        **_mapping(
            {name: _value_schema(declared) for name, declared in all_settings().items()}
            | former_names_schema(all_settings(), _value_schema)
        ),
        **_only_one_name(all_settings()),
    }


def former_names_schema(
    settings: Mapping[str, Setting], schema_of: Callable[[Setting], dict[str, Any]]
) -> dict[str, Any]:
    """Schemas of earlier names of settings, marked as deprecated."""
    return {
        former: schema_of(declared) | {"description": f"Earlier name of {name}", "deprecated": True}
        for name, declared in settings.items()
        for former in declared.key.former_names
    }


def _only_one_name(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Reject a file that gives a setting under two names."""
    pairs = [[name, former] for name, declared in settings.items() for former in declared.key.former_names]
    return {"allOf": [{"not": {"required": pair}} for pair in pairs]} if pairs else {}


def _mapping(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value_schema(declared: Setting) -> dict[str, Any]:
    """Return the schema of a value in the file, with its default and the alternative forms that the file allows."""
    if declared.key.item is ModelEntry:
        entries = {"type": "array", "items": {"anyOf": [{"type": "string"}, _model_schema()]}}
        return {"description": declared.key.help, **entries}
    schema = setting_schema(declared)
    schema["description"] += f" [default: {declared.default_text}]"
    if isinstance(declared.default, bool | int | float | str) and declared.default != "":
        schema["default"] = declared.default
    if "off" in declared.choices:
        schema["enum"].append(False)  # YAML 1.1 reads a bare off as false
        schema["type"] = [schema["type"], "boolean"]
    if declared.kind is tuple:
        return {"anyOf": [schema, {"type": "string"}], "description": schema.pop("description")}
    if (declared.optional and not declared.key.none_word) or isinstance(declared.default, Path):
        schema["type"] = [*([kind] if isinstance(kind := schema["type"], str) else kind), "null"]
        if "enum" in schema:
            schema["enum"].append(None)
    return schema


def _model_schema() -> dict[str, Any]:
    names = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
    own = {
        "name": {
            "type": "string",
            "description": "Name of the model in requests [default: the id, or the folder's name]",
        },
        "path": {
            "type": "string",
            "description": "Folder of the model, or its Hugging Face id, ORG/NAME or ORG/NAME@REVISION",
        },
        "aliases": {**names, "description": "Additional names that requests may use"},
    }
    settings = {name: setting_schema(declared) for name, declared in model_settings().items()}
    return {**_mapping(own | settings), "required": ["path"]}
