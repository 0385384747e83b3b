"""Adds the page to the coordinator's application: screens, forms, and the files that they load."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from coordinator.facts.recent import Recent
from coordinator.page import actions, pages

TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
STATIC = ("page.css", "page.js", "htmx.min.js", "uplot.min.js", "uplot.min.css", "icon.svg", "LICENSES.txt")


def add_page(application: FastAPI) -> None:
    """Serve the page beside the API of an application of `create_app`."""
    application.state.recent = Recent()
    loaded = {name: files("coordinator.page").joinpath("static", name).read_bytes() for name in STATIC}

    @application.get("/static/{name}", include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        """A file that pages load; needs no login."""
        if name not in loaded:
            raise HTTPException(404, f"there is no file {name!r}")
        return Response(loaded[name], 200, {"Cache-Control": "max-age=3600"}, TYPES[name.rpartition(".")[2]])

    for router in (actions.sessions, actions.router, pages.router):
        application.include_router(router)
