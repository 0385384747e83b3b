"""The web page for operators: facts as HTML, and forms for changes. Every screen has a URL and works without JavaScript."""

from fastapi import FastAPI

from coordinator.http.refusals import answer_problems
from coordinator.page import pages
from coordinator.page.views import Recent, as_page, static_files


def add_page(application: FastAPI) -> None:
    """Add screens, forms and their static files to an application made by `create_app`."""
    application.state.recent = Recent()
    answer_problems(application, as_page)
    for router in (static_files, pages.router, pages.sessions, pages.own_forms, pages.forms):
        application.include_router(router)
