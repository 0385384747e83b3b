"""The coordinator's latest events in its database, with their sentences, for page, API and commands. Part of the store.

The event log (`events.jsonl`) has every event at once. The table gets them in one transaction every `FLUSH_S`, so it may miss the last ones
after a kill. Ids increase, and readers continue from their last one.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Select, delete, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from coordinator.storage import schema
from fedcg.errors import in_words
from fedcg.event_log import EventLog, EventValue, log_event
from fedcg.sentences import LEVEL_NAMES, LEVELS, Sentence, sentence_of
from fedcg.values import Value

FLUSH_S, RETRY_S = 0.25, 5.0
KEEP = 100_000
"""Number of events kept: about 40 MB."""
MAX_WAITING = 10_000
"""Most events waiting for a busy or full database; older ones are dropped and are only in the log."""
Event = dict[str, Any]
"""The fields of an event with `id`, `level` and `message`, its sentence in the log."""
_log = logging.getLogger(__name__)


class EventFilter(Value):
    """Selects events; an empty field matches every event.

    Attributes:
        text: in the event's sentence or fields, ignoring case.
        level: the lowest level; events selected by name are shown at any level.
        since, until: unix times; `until` is excluded.
    """

    event: str = ""
    client: str = ""
    federation: str = ""
    text: str = ""
    level: str = ""
    since: float | None = None
    until: float | None = None


class Events(schema.Queries):
    """Adds events from any thread, and reads them. If the database fails, adding never blocks; writing is retried."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)
        self._planning, self._writing = threading.Lock(), threading.Lock()
        self._flushing: threading.Timer | None = None
        self._newest: int | None = None
        self._fails = False

    def add(self, event: Mapping[str, EventValue]) -> None:
        """Add an event; it is in the table shortly after."""
        level, message = sentence_of(event) or Sentence(LEVELS["debug"], str(event["event"]).replace("_", " "))
        named = {name: str(event.get(name) or "") for name in ("event", "client", "federation")}
        row = {**named, "t": event.get("t") or 0.0, "level": level, "message": message, "content": json.dumps(event)}
        with self._planning:
            self._waiting.append(row)
        self._plan()

    def _plan(self, wait_s: float = FLUSH_S) -> None:
        with self._planning:
            if self._flushing is None:
                self._flushing = threading.Timer(wait_s, self.flush)
                self._flushing.daemon = True
                with suppress(RuntimeError):  # the program is exiting and closes the store, which flushes
                    self._flushing.start()

    def flush(self) -> None:
        """Write waiting events to the table."""
        with self._writing:
            with self._planning:
                if self._flushing is not None:
                    self._flushing.cancel()
                self._flushing = None
            rows, table = [self._waiting.popleft() for _ in range(len(self._waiting))], schema.events
            if not rows:
                return
            try:
                with self._engine.begin() as connection:
                    before = connection.execute(select(func.max(table.c.id))).scalar_one() or 0
                    numbered = [{"id": number, **row} for number, row in enumerate(rows, before + 1)]
                    connection.execute(insert(table), numbered)
                    connection.execute(delete(table).where(table.c.id <= before + len(rows) - KEEP))
                self._newest, self._fails = before + len(rows), False
            except SQLAlchemyError as error:  # such as a full disk
                if not self._fails:
                    what = "events can't be written to the database; until then, the page doesn't show them: %s"
                    _log.warning(what, in_words(error))
                self._fails = True
                with self._planning:
                    self._waiting = deque([*rows, *self._waiting], maxlen=MAX_WAITING)
                self._plan(RETRY_S)

    def newest(self) -> int:
        """The id of this process's newest event; 0 before the first."""
        if self._newest is None:
            with self._engine.connect() as connection:
                self._newest = connection.execute(select(func.max(schema.events.c.id))).scalar_one() or 0
        return self._newest

    def last(self, wanted: EventFilter, limit: int, before: int | None = None) -> list[Event]:
        """The last matching events, newest first; with `before`, only those with a lower id."""
        self.flush()
        table = schema.events
        query = select(table).order_by(table.c.id.desc()).limit(limit)
        for name, value in (("event", wanted.event), ("client", wanted.client), ("federation", wanted.federation)):
            if value:
                query = query.filter_by(**{name: value.replace("\0", "")})
        if before is not None:
            query = query.where(table.c.id < before)
        if wanted.since is not None:
            query = query.where(table.c.t >= wanted.since)
        if wanted.until is not None:
            query = query.where(table.c.t < wanted.until)
        if wanted.level and not wanted.event:
            query = query.where(table.c.level >= LEVELS.get(wanted.level, 0))
        if wanted.text:
            query = query.where(
                (table.c.message + " " + table.c.content).icontains(wanted.text.replace("\0", ""), autoescape=True)
            )
        return self._events(query)

    def after(self, number: int, limit: int) -> list[Event]:
        """The events after the one with this id, oldest first."""
        table = schema.events
        return self._events(select(table).where(table.c.id > number).order_by(table.c.id).limit(limit))

    def _events(self, query: Select[Any]) -> list[Event]:
        return [
            {**json.loads(row.content), "id": row.id, "level": LEVEL_NAMES[row.level], "message": row.message}
            for row in self._rows(query)
        ]


def coordinator_log(
    path: Path,
    table: Events,
    allows: Callable[[str, str], bool] = lambda event, client: True,
    follow: Callable[[Mapping[str, EventValue]], None] = lambda event: None,
) -> EventLog:
    """The event log of a coordinator, which writes every event to the file, the process's log and the table.

    Args:
        path: path of the file.
        table: table in the database.
        allows: whether another event of (event, client) is written.
        follow: called with every event.
    """

    def watch(event: dict[str, EventValue]) -> None:
        for each in (log_event, table.add, follow):
            each(event)

    return EventLog(path, time.time, allows, watch=watch)
