"""Adds the page to the coordinator's application: screens, forms, and the files that they load."""

from __future__ import annotations

from fastapi import FastAPI

from coordinator.facts.recent import Recent
from coordinator.http.problems import answer_problems
from coordinator.page import actions, pages, static_files
from coordinator.page.views import as_page


def add_page(application: FastAPI) -> None:
    """Serve the page beside the API of an application of `create_app`."""
    application.state.recent = Recent()
    answer_problems(application, as_page)
    for router in (static_files.router, actions.sessions, actions.router, pages.router):
        application.include_router(router)
