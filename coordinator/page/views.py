"""Shared by all routes of the page: identity, cached facts, rendering with filters, errors as pages, form fields, static files.

The value None is rendered as "unavailable".
"""

import threading
import time
from collections.abc import Callable, Hashable
from datetime import datetime, timezone
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.filters import do_filesizeformat
from markupsafe import Markup, escape

from coordinator.facts.known import Known
from coordinator.facts.problems import open_problems
from coordinator.http.access import COOKIE, READING, Identity, Role, access_of, form_fields
from coordinator.http.changes import SECRET_FIELDS
from coordinator.http.operator_api import known_from
from coordinator.http.refusals import UNFORESEEN, ProblemError, problem_of
from fedcg import text_output
from fedcg.values import Value

UNAVAILABLE = Markup('<span class="none">unavailable</span>')
_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


def span(seconds: float) -> str:
    """A span of time in its largest unit, e.g. "3 min"."""
    for size, unit in _UNITS:
        if abs(seconds) >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(at: float) -> Markup:
    """A time on the coordinator's clock; the page's script converts it to the reader's time zone."""
    stamp = datetime.fromtimestamp(at, timezone.utc).isoformat()
    return Markup('<time datetime="{}" data-at="{}">{}</time>').format(stamp, f"{at:.0f}", text_output.moment(at))


def ago(at: float) -> Markup:
    """How long ago a time was; the page's script keeps it current."""
    text = f"{span(max(0.0, time.time() - at))} ago"
    return Markup('<time data-ago="{}" title="{}">{}</time>').format(f"{at:.0f}", text_output.moment(at), text)


def until(at: float) -> Markup:
    """A countdown to a time; the page's script keeps it current."""
    left = at - time.time()
    text = f"in {span(left)}" if left >= 1 else "now"
    return Markup('<time data-until="{}" title="{}">{}</time>').format(f"{at:.0f}", text_output.moment(at), text)


def share(value: float, digits: int = 1) -> str:
    """A share in [0, 1] as a percentage."""
    return f"{100.0 * value:.{digits}f} %"


def points(value: float) -> str:
    """A difference of two shares, in points, with its sign."""
    return f"{100.0 * value:+.1f}".replace("-", "\N{MINUS SIGN}")


def count(value: float) -> str:
    """A number with thousands separators."""
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def words(value: object) -> str:
    """An identifier as words: `not_eligible` is "not eligible"."""
    return str(value).replace("_", " ")


def known(value: object) -> object:
    """The value, or "unavailable" if it is empty."""
    return UNAVAILABLE if value == "" else value


def coded(value: str) -> Markup:
    """A sentence as HTML, with the commands in backticks as code."""
    pieces = value.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if number % 2 else escape(piece) for number, piece in enumerate(pieces)
    )


def moment_of(text: str) -> float | None:
    """The unix time of a date and time in a form, in UTC unless it names a time zone; None if it is empty.

    Raises:
        ValueError: it is not a date and time.
    """
    at = datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
    return None if at is None else (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def qr_code(text: str) -> Markup:
    """A QR code as SVG, dark on white in both themes. It has no inline style, which the page's security policy forbids."""
    import segno

    return Markup(segno.make(text, error="l").svg_inline(border=3, light="#fff", omitsize=True))  # noqa: S704 - shapes only


def add_formats(environment: Environment) -> None:
    """Add these functions as template filters; each one turns None into "unavailable"."""

    def unless_none(function: Callable[..., object]) -> Callable[..., object]:
        return lambda value, *more: UNAVAILABLE if value is None else function(value, *more)

    for function in (span, moment, ago, until, share, points, count, words, known, coded):
        environment.filters[function.__name__] = unless_none(function)
    environment.filters["size"] = unless_none(do_filesizeformat)


FactsT = TypeVar("FactsT")
MAX_AGE_S = 1.0
"""How long facts are cached: many viewers of one page share them, so they are computed once."""
MAX_KEPT = 64
STATIC = files("coordinator.page").joinpath("static")
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
"""Of the files in `STATIC`, by the end of their names."""
FOR_GOOD, ASK_AGAIN = "public, max-age=31536000, immutable", "no-cache"
static_files = APIRouter(include_in_schema=False)


class Recent:
    """A short-lived cache of facts. Thread-safe.

    Args:
        max_age_s: maximum age of a cached fact.
        clock: monotonic seconds.
    """

    def __init__(self, max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: dict[Hashable, tuple[float, threading.Lock, Any]] = {}
        self._changing = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], FactsT]) -> FactsT:
        """The facts of a key: recent ones from the cache, else new ones. Concurrent callers wait for the same new facts."""
        with self._changing:
            made_at, making, facts = self._kept.get(key, (float("-inf"), threading.Lock(), None))
            if self._clock() - made_at < self._max_age_s:
                return cast(FactsT, facts)
            self._kept[key] = (made_at, making, facts)
        with making:
            made_at, _, facts = self._kept.get(key, (float("-inf"), making, None))
            if self._clock() - made_at < self._max_age_s:
                return cast(FactsT, facts)
            facts = make()
            with self._changing:
                self._kept[key] = (self._clock(), making, facts)
                while len(self._kept) > MAX_KEPT:
                    del self._kept[min(self._kept, key=lambda each: self._kept[each][0])]
            return facts

    def clear(self) -> None:
        """Empty the cache after a change."""
        with self._changing:
            self._kept.clear()


@lru_cache
def _loaded(name: str) -> tuple[bytes, str]:
    """The bytes of a file, and their hash."""
    data = STATIC.joinpath(name).read_bytes()
    return data, sha256(data).hexdigest()[:16]


@static_files.get("/static/{name}")
async def static_file(name: str, request: Request) -> Response:
    """A static file of the page; needs no login."""
    kind = TYPES.get(name.rpartition(".")[2])
    if kind is None or not STATIC.joinpath(name).is_file():
        raise HTTPException(404, f"there is no file {name!r}")
    data, digest = _loaded(name)
    tag = f'W/"{digest}"'  # weak, since it may be sent compressed
    headers = {"ETag": tag, "Cache-Control": FOR_GOOD if request.url.query == digest else ASK_AGAIN}
    if tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    return Response(data, 200, headers, kind)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("coordinator.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    add_formats(made)
    # the URL of a file changes with its content
    made.globals.update(version=version("fedcg-edge"), static=lambda name: f"/static/{name}?{_loaded(name)[1]}")
    return made


class View(Value):
    """A request for a page.

    Attributes:
        request: the browser's request.
        identity: the user.
        known: the source of facts, now.
    """

    request: Request
    identity: Identity
    known: Known

    @property
    def may_steer(self) -> bool:
        """Whether to show the forms that make changes."""
        return self.identity.role.includes(Role.OPERATOR)

    @property
    def recent(self) -> Recent:
        """The cached facts."""
        recent: Recent = self.request.app.state.recent
        return recent

    def facts(self, function: Callable[..., FactsT], *arguments: Any) -> FactsT:
        """Facts, at most a second old."""
        return self.recent.get((function.__qualname__, *arguments), lambda: function(self.known, *arguments))

    def changed(self, path: str) -> Response:
        """Redirect to the page that shows a change; the cache is emptied, so that it does."""
        self.recent.clear()
        return see_other(path)

    def render(
        self,
        template: str,
        *,
        federation: str | None = None,
        status: int = 200,
        is_same_for_all: bool = False,
        **values: Any,
    ) -> HTMLResponse:
        """Render a page.

        Args:
            template: its file name.
            federation: the federation shown in the navigation.
            status: HTTP status of the answer.
            is_same_for_all: the live part has no form and depends on the user only by `may_steer`. A refresh then gets only this
                part, rendered at most once a second for all viewers of each kind.
            values: values for the template.
        """
        federations = self.facts(_federations)
        path = self.request.url.path
        url = path + (f"?{self.request.url.query}" if self.request.url.query else "")
        values |= {
            "federations": federations,
            "federation": federation or (federations[0][0] if federations else None),
            "problem_count": len(self.facts(open_problems)),
            "url": url,
            "path": path,
            "now": self.known.now,
            "may_steer": self.may_steer,
            "is_part": is_same_for_all and "HX-Request" in self.request.headers,
        }
        page = _environment().get_template(template)
        if values["is_part"]:
            key = ("part", template, url, self.may_steer)
            return HTMLResponse(self.recent.get(key, lambda: page.render(values)), status)
        form_token = access_of(self.request).form_token(self.request.cookies.get(COOKIE, ""))
        return HTMLResponse(page.render(values, view=self, form_token=form_token), status)


def _federations(known: Known) -> list[tuple[str, str]]:
    """Id and phase of all federations that are not archived: running ones first, newest first within each state."""
    found = []
    for record in known.store.shown_federations()[::-1]:
        status = record.status.value
        found.append((record.id, status if status in ("created", "stopped") else known.state(record.id).label))
    order = "collecting distilling waits_for_owners waiting stalled paused created finished stopped"
    return sorted(found, key=lambda each: order.index(each[1]))


async def view_of(request: Request) -> View:
    """The view of a request; a dependency.

    Raises:
        HTTPException: 303 to the login page, or 401 for a refresh or a form of an open page.
    """
    identity = getattr(request.state, "identity", None) or await access_of(request).identify(request)
    if identity is None:
        if request.headers.get("HX-Request") or request.method != "GET":
            raise HTTPException(401, "the session has ended; log in again")
        to = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        raise HTTPException(303, "log in first", {"Location": f"/login?to={quote(to)}"})
    request.state.identity = identity
    return View(request, identity, known_from(request))


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; a dependency."""
    return {name: value.strip() for name, value in form_fields(await request.body()).items()}


def plain_page(template: str, answer: int = 200, **values: Any) -> HTMLResponse:
    """A page without navigation and facts, for users who may not be logged in."""
    return HTMLResponse(_environment().get_template(template).render(values), answer)


def see_other(path: str) -> RedirectResponse:
    """Redirect to the page that shows a change."""
    return RedirectResponse(path, 303)


def own_path(text: str) -> str:
    """The text if it is a path of this page, or "/" if it names another site."""
    parts = urlsplit(text)
    is_own = not parts.scheme and not parts.netloc and text.startswith("/") and not text.startswith(("//", "/\\"))
    return text if is_own and text.isprintable() else "/"


async def _sent(request: Request) -> dict[str, str]:
    """The user's input in the form of a request, without secrets."""
    try:
        fields = {} if request.method in READING else await form_of(request)
    except ProblemError:
        return {}
    return {name: value for name, value in fields.items() if name not in SECRET_FIELDS}


async def as_page(request: Request, error: Exception) -> Response:
    """The answer to a failed request: an HTML page with the form's fields for a browser, problem details for a program."""
    if isinstance(error, HTTPException) and error.status_code == 303:
        return see_other((error.headers or {})["Location"])
    found, headers = problem_of(error), request.headers
    is_browser = "text/html" in headers.get("Accept", "") or "HX-Request" in headers
    if request.url.path.startswith("/api/") or not is_browser:
        return found.answer(request.url.path)
    if isinstance(error, RequestValidationError):
        found = ProblemError(422, "the URL or the form contains invalid values", problems=found.problems)
    sent = await _sent(request) if "route" in request.scope and found.status != UNFORESEEN else {}
    if found.status == 401 and request.method not in READING and not sent:
        return see_other("/login")
    may_not = found.status in (401, 403)  # others can correct and resend the fields
    form_token = "" if may_not else access_of(request).form_token(request.cookies.get(COOKIE, ""))
    values = {"found": found, "path": request.url.path, "sent": sent, "form_token": form_token}
    page = plain_page("error.html", found.status, **values)
    page.headers.update(found.headers)
    return page
