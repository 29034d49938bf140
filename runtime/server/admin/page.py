"""The page at `/`: a chat, the tree of what is cached, and how requests did."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from pydantic import BaseModel

from radixcache.runtime.demo.script import DOCUMENTS, SCRIPT, TABLE
from radixcache.runtime.files import BUNDLED_MODEL
from radixcache.runtime.server.serving import BackendDep

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FILES = {
    "/" if path.name == "index.html" else f"/{path.name}": (path.name, TYPES[path.suffix])
    for path in sorted(FOLDER.iterdir())
    if path.suffix in TYPES
}
"""File and content type of each path. They hold nothing secret, and the page asks for the key."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(include_in_schema=False)
files = APIRouter(include_in_schema=False)
"""Of the page; they need no model."""


class Example(BaseModel):
    """A conversation to begin with."""

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


def _add(path: str, name: str, media_type: str) -> None:
    @files.get(path)
    async def file() -> FileResponse:
        return FileResponse(FOLDER / name, media_type=media_type, headers=HEADERS)


for _path, _file in FILES.items():
    _add(_path, *_file)
