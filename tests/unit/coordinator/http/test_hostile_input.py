"""Numbers and requests that a machine makes up: every number has bounds, and none of them breaks a page or an answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from coordinator.config import CoordinatorConfig
from coordinator.http.access import Access, Role
from coordinator.http.operator_api import MoreRounds, NewApiToken, NewFederation, Reason
from coordinator.members.enrolment import WantedToken
from coordinator.operations.create_federation import OperatorPlan
from coordinator.paths import Home
from coordinator.token_buckets import Rate
from edge_client.agent.owner import OwnerRequest
from edge_client.config import AgentConfig
from fedcg.learning.spec import FederationSpec, RoundPolicy
from fedcg.wire.artifacts.artifacts import ArtifactHeader
from fedcg.wire.messages.enrolment_messages import EnrolAnswer, EnrolRequest, RenewRequest, Token
from fedcg.wire.messages.schemas import AnyMessage
from tests.support.coordinator.api import Api, running_api
from tests.support.page.pages import ServedPage, tiny_page
from tests.support.waiting import wait_until

BODIES = (NewFederation, Reason, MoreRounds, WantedToken, NewApiToken)
ENROLMENT = (EnrolRequest, EnrolAnswer, RenewRequest, Token)
SCHEMAS: dict[str, Any] = {
    "plan.toml": OperatorPlan,
    "spec": FederationSpec,
    "coordinator.toml": CoordinatorConfig,
    "agent.toml": AgentConfig,
    "owner's requests": OwnerRequest,
    "messages": AnyMessage,
    "header of an artifact": ArtifactHeader,
    **{kind.__name__: kind for kind in (*BODIES, *ENROLMENT)},
}
WORDS = "1e400 Infinity NaN 1e300 31622400 100000 2 1 0 -1 -1e300 1e-300"
EXTREMES = (str(2**63), "9" * 400, *WORDS.split())
JSON = "application/json"
PAGES = "/f/tiny /f/tiny/worth /f/tiny/models /f/tiny/sent /f/tiny/sent.html /devices /devices/a /metrics"
MORE_PAGES = "/ /f/tiny/policy /repairs /events /enrolment /federations /federations/new"
ANSWERS = "devices devices/a problems events enrolment-tokens"
OF_FEDERATION = ("", "/policy", "/policy/changes", "/rounds", "/rounds/1", "/now")
GIVEN = (
    *f"{PAGES} {MORE_PAGES}".split(),
    *(f"/api/v1/{path}" for path in ANSWERS.split()),
    *(f"/api/v1/federations/tiny{path}" for path in OF_FEDERATION),
)


def unbounded(
    schema: dict[str, Any], defined: dict[str, Any], path: str = "", inside: frozenset[str] = frozenset()
) -> Iterator[str]:
    """The numbers of a JSON schema without a least or a largest value."""
    name = schema.get("$ref", "").rpartition("/")[2]
    if name and name not in inside:
        yield from unbounded(defined[name], defined, path, inside | {name})
    is_number = schema.get("type") in ("number", "integer") and not {"const", "enum"} & set(schema)
    ends = ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"})
    if is_number and not all(end & set(schema) for end in ends):
        yield path
    below = [each for kind in ("anyOf", "oneOf", "allOf", "prefixItems") for each in schema.get(kind, ())]
    below += [schema[kind] for kind in ("items", "additionalProperties") if isinstance(schema.get(kind), dict)]
    for each in below:
        yield from unbounded(each, defined, path, inside)
    for field, each in schema.get("properties", {}).items():
        yield from unbounded(each, defined, f"{path}.{field}", inside)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_number_of_a_schema_has_bounds(name: str) -> None:
    schema = TypeAdapter(SCHEMAS[name]).json_schema()
    assert list(unbounded(schema, schema.get("$defs", {}))) == []


def test_the_walk_finds_a_number_without_bounds() -> None:
    class Half(BaseModel):
        some: dict[str, tuple[int | None, ...]]

    assert set(unbounded(Half.model_json_schema(), {})) == {".some"}


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    with tiny_page(tmp_path) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("extremes", [EXTREMES, EXTREMES[::-1]], ids=["the least", "the most"])
def test_no_number_of_a_policy_or_token_breaks_a_page_or_an_answer(page: ServedPage, extremes: tuple[str, ...]) -> None:
    reader, as_program = page.reader(), {"Authorization": f"Bearer {page.token(Role.ADMIN)}", "Content-Type": JSON}

    def change(body: str, method: str = "PATCH", path: str = "/policy") -> bool:
        status, _, text = reader.ask(method, f"/api/v1/federations/tiny{path}", body, **as_program)
        assert status in (200, 201, 400, 409, 422), (path, body, text)
        return status < 400

    numbers = [name for name, kind in RoundPolicy.model_json_schema()["properties"].items() if _is_number(kind)]
    assert {"rounds", "deadline_s", "stop_gain", "max_clients"} <= set(numbers)
    assert {name for name in numbers for value in extremes if change(f'{{"{name}": {value}}}')} == set(numbers)
    for value in extremes:
        change(f'{{"rounds": {value}}}', "POST", "/extend")
        body = f'{{"days": {value}, "name": "x", "role": "viewer"}}'
        assert reader.ask("POST", "/api/v1/api-tokens", body, **as_program)[0] in (201, 400, 422)
    assert change('{"min_clients": 2, "min_cohort": 1, "max_clients": null, "fraction": 1, "over_selection": 0}')
    page.made.devices["tiny"][1].silent = True  # the round stays open for as long as it may
    page.made.start()
    wait_until(lambda: bool(page.made.world.store.attempts("tiny")), "a round is opened by this policy")
    reader.post("/devices/a/enable", form_of="/confirm/disable/a")  # which forgets the facts of before
    answers = {path: reader.ask("GET", path, **as_program)[0] for path in GIVEN}
    assert {path for path, status in answers.items() if status != 200} == set()


def _is_number(schema: dict[str, Any]) -> bool:
    return any(each.get("type") in ("number", "integer") for each in (schema, *schema.get("anyOf", ())))


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
