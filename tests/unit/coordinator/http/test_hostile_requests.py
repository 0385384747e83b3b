"""Requests that a machine makes up from /openapi.json, against a running coordinator: none is answered with a server error."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.http.access import Access, Role
from coordinator.http.refusals import Rate
from coordinator.paths import Home
from tests.support.coordinator.api import Api, running_api

STARTS_A_PROCESS = "POST /api/v1/federations"
"""The route that starts a process with torch for content that fits."""
ENDLESS = "GET /api/v1/events/stream"
"""Its answer ends with its reader: test_streams.py has it."""
REAL = {"federation": "casting", "device": "a", "number": 1}


@pytest.fixture
def api(home: Home) -> Iterator[Api]:
    with running_api(home) as running:
        running.store.add_device("a", "aa" * 32, 1.0)
        plenty = Rate(1_000_000, 1_000_000.0)
        running.application.state.access = Access(running.tokens, home.secret(), per_token=plenty)
        yield running


@pytest.mark.slow
def test_no_request_that_the_schema_allows_or_almost_allows_is_answered_with_a_server_error(api: Api) -> None:
    token = {"Authorization": f"Bearer {api.tokens.create('machine', Role.ADMIN).text}"}
    schema: Any = schemathesis.openapi.from_url(f"{api.url}/openapi.json", headers=token)
    operations = [found.ok() for found in schema.get_all_operations() if found.ok().label != ENDLESS]
    asked = {operation.label: asked_of(operation, token) for operation in operations}
    assert len(asked) >= 25
    assert {200, 404} <= asked["GET /api/v1/federations/{federation}"]
    assert 200 in asked["PATCH /api/v1/federations/{federation}/policy"]


def asked_of(operation: Any, token: dict[str, str]) -> set[int]:
    """Make requests to one route; returns the statuses of the answers."""
    statuses = set()

    @settings(
        max_examples=4 if operation.label == STARTS_A_PROCESS else 40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), is_real=st.booleans(), key=st.sampled_from(["", "again"]))
    def ask(case: Any, is_real: bool, key: str) -> None:
        if is_real:
            case.path_parameters = {name: REAL.get(name, value) for name, value in case.path_parameters.items()}
        answer = case.call(headers={**token, **({"Idempotency-Key": key} if key else {})}, timeout=60)
        statuses.add(answer.status_code)
        assert answer.status_code < 500 or operation.label == "GET /readyz", (case.body, answer.text)

    ask()
    return statuses
