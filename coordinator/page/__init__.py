"""The page for people: what the facts hold as HTML, and forms that steer. Every screen is a URL that also works without script."""

from fastapi import FastAPI

from coordinator.http.refusals import answer_problems
from coordinator.page import pages
from coordinator.page.views import Recent, as_page, static_files


def add_page(application: FastAPI) -> None:
    """Serve screens, forms and the files that they load beside the API of an application of `create_app`."""
    application.state.recent = Recent()
    answer_problems(application, as_page)
    for router in (static_files, pages.router, pages.sessions, pages.forms):
        application.include_router(router)
