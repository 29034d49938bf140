"""Fields that ask for structured outputs: OpenAI's and vLLM's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams
from radixcache.runtime.server.protocol.fields import Body, Flag, Json, List, StrictModel, Text

Schema = Json | bool
KINDS = ("json", "regex", "choice", "grammar", "json_object")
_SAMPLED = {"temperature", "top_p", "top_k", "ends_conversation", "stop"}
Choices = Annotated[List[Text], Field(min_length=1)]


class NamedSchema(Body):
    """A JSON schema as OpenAI has it; answers always follow it strictly."""

    name: Text | None = None
    description: Text | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("the json_schema is missing")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("a json_schema belongs to the type json_schema, and to no other")
        return self

    def structured(self) -> StructuredOutputsParams | None:
        return _structured(self.type, self.json_schema)


class OutputFormat(NamedSchema):
    """The format of /v1/responses and /v1/messages: a type and a schema in one object."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _has_its_schema(self) -> OutputFormat:
        if self.type != "json_schema" and self.schema_ is not None:
            raise ValueError("a schema belongs to the type json_schema, and to no other")
        return self

    def structured(self) -> StructuredOutputsParams | None:
        return _structured(self.type, self)


class FormatOptions(StrictModel):
    """Options with a format, as /v1/responses and /v1/messages have them."""

    format: OutputFormat | None = None


def sampled(
    defaults: SamplingParams, body: Body, options: FormatOptions | None, **asked: Any
) -> SamplingParams:
    """The body's sampling parameters with the options' format; what is None is `defaults`'."""
    asked |= {n: getattr(body, n) for n in _SAMPLED & type(body).model_fields.keys()}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    form = None if options is None else options.format
    return replace(defaults, structured_outputs=form.structured() if form else None, **given)


def _structured(kind: str, schema: NamedSchema | None) -> StructuredOutputsParams | None:
    """The structure to follow; None for free text."""
    if kind == "text":
        return None
    if schema is None or schema.schema_ is None:
        return StructuredOutputsParams.json_object()
    return StructuredOutputsParams.json(schema.schema_)


class StructuredOutputs(Body):
    """The form of the answer as vLLM has it; exactly one field is given."""

    json_: Schema | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: Flag | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_alone(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in KINDS and value[name] not in (None, False):
                raise ValueError(f"{name} is not supported; give one of {', '.join(KINDS)}")
        return value

    def all(self) -> list[StructuredOutputsParams]:
        found = []
        for kind in KINDS[:4]:
            value = self.json_ if kind == "json" else getattr(self, kind)
            if value is not None:
                found.append(getattr(StructuredOutputsParams, kind)(value))
        return found + ([StructuredOutputsParams.json_object()] if self.json_object else [])

    @model_validator(mode="after")
    def _not_none(self) -> StructuredOutputs:
        if not self.all():
            raise ValueError("none is given of " + ", ".join(KINDS))
        return self


class StructuredFields(Body):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def structured(self) -> StructuredOutputsParams | None:
        forms = self.structured_outputs.all() if self.structured_outputs else []
        if self.response_format and (form := self.response_format.structured()):
            forms.append(form)
        if len(forms) > 1:
            raise ValueError(
                f"{len(forms)} forms of the answer: response_format and structured_outputs "
                "together may ask for one"
            )
        return forms[0] if forms else None

    @model_validator(mode="after")
    def _one_form(self) -> StructuredFields:
        self.structured()  # refuses
        return self
