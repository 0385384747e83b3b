"""The files that pages load: scripts, styles, the icon. Each has the hash of its content in its address, and browsers keep it for good."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

TYPES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "htmx.min.js": "text/javascript",
    "uplot.min.js": "text/javascript",
    "uplot.min.css": "text/css",
    "icon.svg": "image/svg+xml",
    "LICENSES.txt": "text/plain",
}
FOR_GOOD, ASK_AGAIN = "public, max-age=31536000, immutable", "no-cache"
router = APIRouter(include_in_schema=False)


@lru_cache
def _loaded(name: str) -> tuple[bytes, str]:
    """The bytes of a file, and their hash."""
    data = files("coordinator.page").joinpath("static", name).read_bytes()
    return data, sha256(data).hexdigest()[:16]


def address_of(name: str) -> str:
    """The address of a file, which changes with its content."""
    return f"/static/{name}?{_loaded(name)[1]}"


@router.get("/static/{name}")
async def static_file(name: str, request: Request) -> Response:
    """A file that pages load; needs no login."""
    if name not in TYPES:
        raise HTTPException(404, f"there is no file {name!r}")
    data, digest = _loaded(name)
    tag = f'W/"{digest}"'  # weak: it may be sent compressed
    headers = {"ETag": tag, "Cache-Control": FOR_GOOD if request.url.query == digest else ASK_AGAIN}
    if tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    return Response(data, 200, headers, TYPES[name])
