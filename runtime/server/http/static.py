"""The files of the page at `/`: a chat, the cached tree, and recent requests."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

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
"""File and content type of each path. They are public; the page asks the user for the key."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(include_in_schema=False)
"""The page's routes, which need no model."""


def _add(path: str, name: str, media_type: str) -> None:
    @router.get(path)
    async def file() -> FileResponse:
        return FileResponse(FOLDER / name, media_type=media_type, headers=HEADERS)


for _path, _file in FILES.items():
    _add(_path, *_file)
