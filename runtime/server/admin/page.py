"""What the page at `/` has to know of the model."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from radixcache.runtime.demo.script import DOCUMENTS, SCRIPT, TABLE
from radixcache.runtime.files import BUNDLED_MODEL
from radixcache.runtime.server.serving import BackendDep

router = APIRouter(include_in_schema=False)


class Example(BaseModel):
    system: str
    questions: list[str]


class Defaults(BaseModel):
    """How answers are sampled where a request does not say; `description` in a few words."""

    temperature: float
    top_p: float
    max_tokens: int | None
    description: str


class About(BaseModel):
    """What the page has to know; `note` says what may be expected of the model."""

    model: str
    note: str | None
    example: Example | None
    sampling: Defaults


@router.get("/page.json")
async def about(backend: BackendDep) -> About:
    """The model, how it answers, and something that it can be asked."""
    example = note = None
    if backend.llm.model_name == BUNDLED_MODEL.name:
        questions = [question.text for question in SCRIPT if DOCUMENTS[question.user] == TABLE]
        example = Example(system=TABLE.read_text(encoding="utf-8"), questions=questions[:4])
        note = "looks up the table above; radixcache serve MODEL for a real one"
    params = backend.chat_defaults
    sampling = Defaults(
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=params.max_tokens,
        description=params.describe(),
    )
    return About(model=backend.names[0], note=note, example=example, sampling=sampling)
