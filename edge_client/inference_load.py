"""How many predictions the box's own inference server is asked for: its counters, read over HTTP. Knows nothing of training."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

LEAST_S = 1.0
"""Between two readings that a rate is made of."""
TIMEOUT_S = 1.0
MOST_BYTES = 1 << 20
_REQUESTS = re.compile(r"^fedcg_serve_requests_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the owner's own URL, http or https by its pattern
        return str(answer.read(MOST_BYTES).decode("utf-8", "replace"))


class InferenceLoad:
    """Requests per second between two looks at the server's `/metrics`.

    Args:
        url: of the server; None: there is none, and nothing is known.
        page: fetches a page.
        clock: monotonic seconds.
    """

    def __init__(
        self, url: str | None, page: Callable[[str], str] = _page, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url, self._page, self._clock = url, page, clock
        self._before: tuple[float, float] | None = None
        self._rate: float | None = None

    def __call__(self) -> float | None:
        """The rate since the look before this one; None at the first, or where the server does not answer."""
        if self._url is None:
            return None
        now = self._clock()
        if self._before is not None and now - self._before[0] < LEAST_S:
            return self._rate
        try:
            text = self._page(f"{self._url.rstrip('/')}/metrics")
        except (OSError, ValueError):
            self._before = self._rate = None
            return None
        count = sum(float(number) for number in _REQUESTS.findall(text))
        before, self._before = self._before, (now, count)
        # A server that was started again counts from 0.
        self._rate = None if before is None or count < before[1] else (count - before[1]) / (now - before[0])
        return self._rate
