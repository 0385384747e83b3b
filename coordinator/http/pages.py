"""Lists in pages: the items after a cursor, and the Link header to the next ones."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import Request, Response

from coordinator.http.problems import ProblemError

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Pages:
    """The page that a request asks for; the link to the next one goes into the answer.

    A cursor is the key of the page's last item: items that come or go between two requests shift nothing.
    """

    request: Request
    response: Response
    limit: int
    cursor: str | None

    def of(
        self, items: Sequence[ItemT], key: Callable[[ItemT], tuple[Any, ...]], *, descending: bool = False
    ) -> list[ItemT]:
        """The items of the page.

        Args:
            items: all of them.
            key: sorts them, and is different for each.
            descending: the highest key first.

        Raises:
            ProblemError: 422, not a cursor of this list.
        """
        ordered = sorted(items, key=key, reverse=descending)
        if self.cursor is not None:
            try:
                last = tuple(json.loads(base64.urlsafe_b64decode(self.cursor)))
                ordered = [item for item in ordered if (key(item) < last if descending else key(item) > last)]
            except (ValueError, TypeError, RecursionError) as error:
                raise ProblemError(422, "the cursor is not one of this list; ask without one") from error
        page = ordered[: self.limit]
        if len(ordered) > len(page):
            self.response.headers["Link"] = link_to(self.request, _cursor(key(page[-1])))
        return page


def link_to(request: Request, cursor: str) -> str:
    """The value of a Link header: the same request, with another cursor."""
    query = [(name, value) for name, value in request.query_params.multi_items() if name not in ("cursor", "after")]
    return f'<{request.url.path}?{urlencode([*query, ("cursor", cursor)])}>; rel="next"'


def _cursor(key: tuple[Any, ...]) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()
