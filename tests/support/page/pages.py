"""The page of federations on an in-memory broker, over real HTTP; a client with cookies and without scripts; databases with many devices."""

from __future__ import annotations

import http.client
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI
from sqlalchemy import insert

from coordinator.config import CoordinatorConfig, EnrolmentSettings, RoundSettings, render_config
from coordinator.members.api_tokens import ApiTokens, Role
from coordinator.page import add_page
from coordinator.paths import Home
from coordinator.rounds import records
from coordinator.storage import schema
from coordinator.storage.database import HighWater
from coordinator.storage.store import Store
from fedcg.files import checked_secret
from fedcg.wire.messages.schemas import Outcome
from tests.support.coordinator.api import running_api
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import World
from tests.support.waiting import wait_until
from tests.support.wire.golden_files import CONDITION

GATHER = RoundSettings(gather_s=60.0, retry_s=0.0)
FORM_TOKEN = re.compile(r'name="form_token" value="([0-9a-f]+)"')


@dataclass
class Reader:
    """Requests pages like a browser without scripts; keeps the session's cookie."""

    port: int
    cookie: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def get(self, path: str) -> tuple[int, str]:
        status, _, text = self.ask("GET", path)
        return status, text

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
        status, found, content = self.transfer(method, path, body, **headers)
        return status, found, content.decode()

    def transfer(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Return the answer with its raw body."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        cookies = {"Cookie": self.cookie} if self.cookie else {}
        try:
            link.request(method, path, body or None, {"Accept": "text/html", **cookies, **self.headers, **headers})
            answer = link.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            link.close()

    def post(self, path: str, form_of: str = "", **fields: str) -> tuple[int, dict[str, str], str]:
        """Send a form, with the hidden token from the page `form_of`."""
        if form_of:
            found = FORM_TOKEN.search(self.get(form_of)[1])
            assert found is not None, f"{form_of} has no form"
            fields["form_token"] = found[1]
        return self.ask("POST", path, urlencode(fields), **{"Content-Type": "application/x-www-form-urlencoded"})

    def log_in(self, token: str) -> Reader:
        status, headers, text = self.post("/login", token=token)
        assert status == 303, text
        self.cookie = headers["set-cookie"].partition(";")[0]
        return self


def shows(reader: Reader, path: str, *texts: str) -> str:
    """Wait until a page shows all of these; returns it."""
    page = ""

    def is_shown() -> bool:
        nonlocal page
        page = reader.get(path)[1]
        return all(text in page for text in texts)

    wait_until(is_shown, f"{path} shows {texts}; {page}")
    return page


@dataclass
class ServedPage:
    """The page of a running coordinator."""

    made: Federations
    port: int
    application: FastAPI

    def token(self, role: Role = Role.OPERATOR) -> str:
        return ApiTokens(self.made.world.store.api).create(role.value, role).text

    def reader(self, role: Role = Role.OPERATOR) -> Reader:
        return Reader(self.port).log_in(self.token(role))


@contextmanager
def tiny_page(
    root: Path, *names: str, rounds: int = 2, prepare: Callable[[World], object] = lambda world: None, **options: Any
) -> Iterator[ServedPage]:
    """The page of the federation "tiny" with the options of `World`, and of the named federations; `prepare` is called before it runs."""
    world = World(root / "home", tiny_spec(rounds), **{"pacing": GATHER, **options})
    made = Federations(world, *names)
    prepare(world)
    with served(made) as page:
        yield page
    world.store.close()


@contextmanager
def served(made: Federations) -> Iterator[ServedPage]:
    """Run the coordinator of these federations with its page; its devices are started by the test."""
    home = Home(made.world.root)
    home.config_file.write_text(render_config(CoordinatorConfig(enrolment=EnrolmentSettings(port=8444))))
    home.secret_file.write_bytes(checked_secret(b"s" * 32))
    HighWater(home, made.world.store._engine).lift()  # the world's database has no home before
    with made.running(), running_api(home, made.coordinator) as api:
        add_page(api.application)
        yield ServedPage(made, api.port, api.application)


def add_crowd(store: Store, federation: str, devices: int, rounds: int, now: float) -> None:
    """Add devices with certificates, presence, and an update to every closed round; round `rounds` + 1 is open for all of them.

    Every eighth device reports a loss against its local-only model, every tenth declined the open round.
    """
    first, names = store.aggregates(federation)[0], [f"line-{number:04d}" for number in range(devices)]
    condition, declined = CONDITION.model_dump_json(), (records.ParticipantState.DECLINED, "no_data")
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for index, name in enumerate(names):
        rows["devices"].append(records.DeviceRecord(name, "0" * 64, now - 9e5, now - index, "0.1.0"))
        rows["certificates"].append(
            records.CertificateRecord(f"{index:x}", name, now - 9e5, now + 9e5, None, "x" * 800)
        )
        ages = (7200.0, 1800.0, 600.0)
        rows["presence"] += [records.PresenceRecord(federation, name, now - age, age != 1800.0) for age in ages]
        rows["conditions"].append(records.ConditionRecord(federation, name, now - 60, condition))
    for number in range(1, rounds + 2):
        is_open, opened = number > rounds, now - (rounds - number + 2) * 600
        state, closed = (
            (records.AttemptState.COLLECTING, None) if is_open else (records.AttemptState.CLOSED, opened + 480)
        )
        at: dict[str, Any] = {"federation": federation, "round": number, "attempt": 1}
        rows["attempts"].append(
            records.AttemptRecord(
                **at, state=state, base=first.artifact, opened_at=opened, deadline_at=now + 900, closed_at=closed
            )
        )
        for index, name in enumerate(names):
            answer = declined if is_open and index % 10 == 3 else (records.ParticipantState.ACCEPTED, "")
            rows["participants"].append({**at, **asdict(records.ParticipantRecord(name, *answer))})
            if not is_open:
                rows["updates"].append(_update(federation, number, index, name, opened + 600))
        if not is_open:
            rows["aggregates"].append(replace(first, round=number, attempt=1, stored_at=opened + 600))
    with store._engine.begin() as connection:
        for table, values in rows.items():
            found = [value if isinstance(value, dict) else asdict(value) for value in values]
            connection.execute(insert(schema.metadata.tables[table]), found)


def _update(federation: str, number: int, index: int, name: str, at: float) -> records.UpdateRecord:
    alone = 0.62 + 0.02 * number + 0.0001 * (index % 100)
    report = {
        "examples": 100 + index,
        "accuracy": alone + (-0.03 if index % 8 == 5 else 0.05),
        "shadow": alone,
        "health": "ok",
        "downloaded": alone - 0.1,
        "per_class": {"accuracy": [alone, None, 0.9], "shadow": [alone - 0.01, None, 0.8], "downloaded": None},
    }
    artifact, size, stored = f"{index:032x}{number:032x}", 120_000 + index, at + index * 0.001
    told = json.dumps(report)
    record = records.UpdateRecord(federation, number, 1, name, artifact, size, Outcome.ACCEPTED, "", told, at, stored)
    return replace(record, weight=100 + index)
