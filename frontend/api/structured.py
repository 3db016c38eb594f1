"""The forms in which clients ask for structured output: OpenAI's response_format and vLLM's structured_outputs."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from frontend.api.fields import RequestModel

# A JSON Schema as an object or, from vLLM's older clients, as its text.
JsonSchema = Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]
Choices = Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]


class JsonSchemaFormat(RequestModel):
    """The nested part of response_format; `strict` changes nothing: answers are always held to the schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def _none_if_empty(value: Any) -> Any:
    return None if value in ({}, []) else value


class StructuredOutputs(RequestModel):
    """vLLM's structured_outputs: one of these."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


Structured = Annotated[StructuredOutputs | None, BeforeValidator(_none_if_empty)]
GuidedChoice = Annotated[Choices | None, BeforeValidator(_none_if_empty)]
