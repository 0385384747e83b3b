"""Every number that comes from outside has bounds, and none within them breaks a page or an answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from coordinator.config import CoordinatorConfig
from coordinator.http import operator_api
from coordinator.members.api_tokens import Role
from coordinator.operations.create_federation import OperatorPlan
from edge_client.agent.owner import OwnerRequest
from edge_client.config import AgentConfig
from fedcg.learning.spec import FederationSpec, RoundPolicy
from fedcg.wire.artifacts.artifacts import ArtifactHeader
from fedcg.wire.messages import enrolment_messages
from fedcg.wire.messages.schemas import AnyMessage
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.page.pages import ServedPage, served
from tests.support.waiting import wait_until

BODIES = (
    operator_api.NewFederation,
    operator_api.Reason,
    operator_api.MoreRounds,
    operator_api.NewToken,
    operator_api.NewApiToken,
)
ENROLMENT = (
    enrolment_messages.EnrolRequest,
    enrolment_messages.EnrolAnswer,
    enrolment_messages.RenewRequest,
    enrolment_messages.Token,
)
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
EXTREMES = (
    str(2**63),
    "9" * 400,
    "1e400",
    "Infinity",
    "NaN",
    "1e300",
    "31622400",
    "100000",
    "2",
    "1",
    "0",
    "-1",
    "-1e300",
    "1e-300",
)
JSON = "application/json"
PAGES = (
    "/",
    "/f/tiny",
    "/f/tiny/worth",
    "/f/tiny/models",
    "/f/tiny/sent",
    "/f/tiny/sent.html",
    "/devices",
    "/devices/a",
)
MORE_PAGES = ("/devices.csv", "/repairs", "/events", "/enrolment", "/federations", "/federations/new", "/metrics")
OF_FEDERATION = ("", "/policy", "/rounds", "/rounds/1", "/now")
ANSWERS = (
    "devices",
    "devices/a",
    "problems",
    "events",
    "enrolment-tokens",
    *(f"federations/tiny{p}" for p in OF_FEDERATION),
)
GIVEN = (*PAGES, *MORE_PAGES, *(f"/api/v1/{path}" for path in ANSWERS))


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
    spec = tiny_spec()
    made = Federations(World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), min_clients=2))
    with served(made) as running:
        yield running
    made.world.store.close()


@pytest.mark.slow
@pytest.mark.parametrize("extremes", [EXTREMES, EXTREMES[::-1]], ids=["the least", "the most"])
def test_no_number_that_a_policy_or_a_token_takes_breaks_a_page_or_an_answer(
    page: ServedPage, extremes: tuple[str, ...]
) -> None:
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
    for device in page.made.devices["tiny"]:
        device.start()
    wait_until(lambda: bool(page.made.world.store.attempts("tiny")), "a round is opened by this policy")
    reader.post("/devices/a/enable", form_of="/confirm/disable/a")  # which forgets the facts of before
    answers = {path: reader.ask("GET", path, **as_program)[0] for path in GIVEN}
    assert {path for path, status in answers.items() if status != 200} == set()


def _is_number(schema: dict[str, Any]) -> bool:
    return any(each.get("type") in ("number", "integer") for each in (schema, *schema.get("anyOf", ())))
