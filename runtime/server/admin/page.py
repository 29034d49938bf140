"""The data of the page at `/`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.demo.script import DOCUMENTS, SCRIPT, TABLE
from radixcache.runtime.server.serving import ContextDep

router = APIRouter(include_in_schema=False)


@router.get("/page.json")
async def about(context: ContextDep) -> dict[str, Any]:
    """The model's name and sampling defaults, an example to ask, and a note on what to expect."""
    example = note = None
    if context.llm.model_name == BUNDLED_MODEL.name:
        questions = [question.text for question in SCRIPT if DOCUMENTS[question.user] == TABLE]
        example = {"system": TABLE.read_text(encoding="utf-8"), "questions": questions[:4]}
        note = "looks up the table above; radixcache serve MODEL for a real one"
    params = context.chat_defaults
    sampling = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "description": params.describe(),
    }
    return {"model": context.names[0], "note": note, "example": example, "sampling": sampling}
