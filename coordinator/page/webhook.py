"""Posts to `[page] webhook` when a problem opens or closes, and writes both into the event log."""

import asyncio
import json
import logging
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict

from coordinator.facts.known import Known
from coordinator.facts.problems import Problem, open_problems
from fedcg.event_log import EventLog

LOOK_EVERY_S = 10.0
SETTLED_LOOKS = 2
"""Consecutive looks that must agree before a problem opens or closes, so that brief problems are not reported."""
TIMEOUT_S = 5.0
MAX_UNSENT = 100
"""Messages kept for an unavailable receiver; the oldest ones are dropped."""

log = logging.getLogger(__name__)


class ProblemWatch:
    """Detects which problems opened and closed between looks.

    Args:
        settled_looks: consecutive looks that must agree.
    """

    def __init__(self, settled_looks: int = SETTLED_LOOKS) -> None:
        self._settled_looks = settled_looks
        self._open: dict[str, Problem] = {}
        self._looks: dict[str, int] = {}

    def look(self, there: list[Problem]) -> tuple[list[Problem], list[Problem]]:
        """Take the present problems; returns those that opened and those that closed."""
        now = {each.key: each for each in there}
        # for keys that are about to change
        self._looks = {key: self._looks.get(key, 0) + 1 for key in now.keys() ^ self._open.keys()}
        settled = {key for key, looks in self._looks.items() if looks >= self._settled_looks}
        opened = [now[key] for key in sorted(settled & now.keys())]
        closed = [self._open[key] for key in sorted(settled - now.keys())]
        for each in opened:
            self._open[each.key] = each
        for each in closed:
            del self._open[each.key]
        return opened, closed


@asynccontextmanager
async def watching(
    known: Callable[[], Known], events: EventLog, url: str | None, every_s: float = LOOK_EVERY_S
) -> AsyncIterator[None]:
    """Check for problems while the context is open.

    Args:
        known: returns the source of all facts.
        events: the event log.
        url: where to post; None posts nothing.
        every_s: seconds between two looks.
    """
    watch = ProblemWatch()
    unsent: deque[dict[str, object]] = deque(maxlen=MAX_UNSENT)

    def look() -> None:
        opened, closed = watch.look(open_problems(known()))
        for name, problems in (("problem_opened", opened), ("problem_closed", closed)):
            for each in problems:
                events.write(name, kind=each.kind, subject=each.subject, what=each.what)
                unsent.append({"event": name, **asdict(each)})
        while url is not None and unsent and _is_posted(url, unsent[0]):
            unsent.popleft()

    async def repeat() -> None:
        while True:
            try:
                await asyncio.to_thread(look)
            except Exception:  # a view must not end the coordinator; the next look tries again
                log.exception("can't determine the open problems")
            await asyncio.sleep(every_s)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _is_posted(url: str, values: dict[str, object]) -> bool:
    """Post an object; False if the receiver did not accept it, and the next look tries again."""
    request = urllib.request.Request(  # noqa: S310 - the configuration allows http and https only
        url, json.dumps(values).encode(), {"Content-Type": "application/json", "User-Agent": "fedcg-edge"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310 - as above
            return True
    except OSError as error:
        log.warning("the webhook %s did not accept %s: %s", url, values["event"], error)
        return False
