"""What users read of what they wrote wrong is in this program's words: no class, no pattern, no text of a library or of the system."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from coordinator.config import CoordinatorConfig
from edge_client.config import AgentConfig
from fedcg.config_file import problems_of, section_of
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.spec import FederationPlan

RAW = re.compile(
    r"<class|\[Errno|_ssl\.c|frozenset|instance of|[Ii]nput should|should |pattern|'\^|\^[\[(]|\{\d|dictionary|boolean|integer|string|parse|"
    r"pydantic|constrained|function-|of another form|[A-Z][a-z]+(Section|Settings|Policy|Config|Params)\b"
)
WRONG: tuple[object, ...] = (
    "text", "", -1, 10**30, 1e300, 3.5, True, [], ["x"], [1], [["y"]], {}, {"a": 1}, {"a": {"b": []}}, "../x y!", "z" * 500
)  # fmt: skip
SCHEMAS: dict[str, type[BaseModel]] = {
    "agent.toml": AgentConfig,
    "coordinator.toml": CoordinatorConfig,
    "plan.toml": FederationPlan,
    **{f"params of {name}": get_method(name).params_type for name in method_names()},
}


def _places(model: type[BaseModel], outside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in model.model_fields:
        yield (*outside, name)
        if (inner := section_of(model, (name,))) is not model:
            yield from _places(inner, (*outside, name))


def _with(place: tuple[str, ...], value: object) -> dict[str, object]:
    first, *rest = place
    return {first: _with(tuple(rest), value) if rest else value}


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_setting_that_is_wrong_is_told_in_words_of_a_library(name: str) -> None:
    raw: set[str] = set()
    refused: set[tuple[str, ...]] = set()
    for place in _places(SCHEMAS[name]):
        for value in WRONG:
            try:
                SCHEMAS[name].model_validate(_with(place, value))
            except ValidationError as error:
                refused.add(place)
                raw |= {line for line in problems_of(SCHEMAS[name], error) if RAW.search(line)}
    assert len(refused) == len(list(_places(SCHEMAS[name])))
    assert raw == set()
