"""What operators change, without a coordinator that runs: what is refused, in which words, and what repeating it does."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from coordinator.errors import NotFoundError, SteeringError
from coordinator.operations.create_federation import too_few_for_sums
from coordinator.operations.operations import Operations
from coordinator.paths import Home
from coordinator.rounds.records import FederationStatus
from coordinator.storage.event_store import coordinator_log
from coordinator.storage.store import Store
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import Part
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.toy_artifacts import tiny_spec

WHOLE = "must be a whole number"


@pytest.fixture
def doing(home: Home) -> Iterator[Operations]:
    with closing(Store.of(home)) as store:
        yield Operations(home, store, coordinator_log(home.events_file, store.events))


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {
                "rounds": 0,
                "fractoin": 0.5,
                "late": "never",
                "min_clients": "two",
                "classes": "x",
                "deadline_s": "inf",
            },
            (
                "classes: is fixed when a federation is opened; `fedcg federation continue` opens one",
                "deadline_s: must be a number (above 0 to 31622400; ",
                "fractoin: there is no such setting (did you mean `fraction`?)",
                "late: must be 'drop' or 'next'",
                f"min_clients: {WHOLE}",
                "rounds: must be greater than or equal to 1 (1 to 100000; rounds until the federation is over)",
            ),
        ),
        (
            {"min_clients": 0, "deadline_s": 1e99, "pace": "fast", "nonsense": 3, "rounds": 1e24, "max_clients": [1]},
            (
                "deadline_s: must be less than or equal to 31622400 (above 0 to 31622400; ",
                f"max_clients: {WHOLE}",
                "min_clients: must be greater than or equal to 1 (1 to 100000; ",
                "nonsense: there is no such setting (known: rounds, min_clients, ",
                "pace: must be 'equal-steps' or 'equal-time' (",
                f"rounds: {WHOLE} (1 to 100000; ",
            ),
        ),
        ({"min_cohort": True, "deadline_s": True}, ("deadline_s: must be a number", f"min_cohort: {WHOLE}")),
        ({"min_cohort": "3", "rounds": 5.5}, (f"min_cohort: {WHOLE}", f"rounds: {WHOLE}")),
        ({"require_cohort": "1"}, ("require_cohort: must be true or false",)),
        ({"require_cohort": 1}, ("require_cohort: must be true or false",)),
        ({"min_clients": 2, "min_cohort": 3}, ("min_clients: min_clients = 2 is below min_cohort = 3",)),
    ],
)
def test_everything_that_is_wrong_with_a_changed_policy_is_named_at_once_and_nothing_is_changed(
    doing: Operations, changes: dict[str, Any], problems: tuple[str, ...]
) -> None:
    before = doing.store.federation("casting")
    with pytest.raises(SteeringError) as refused:
        doing.change_policy("casting", changes)
    first, *found = str(refused.value).split("\n  ")
    assert first == f"policy of casting: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
    for line, start in zip(sorted(found), problems, strict=True):
        assert line.startswith(start)
    assert doing.store.federation("casting") == before


def test_a_policy_of_fewer_clients_than_masked_sums_take_is_refused_with_the_reason_that_a_plan_gets(
    home: Home, doing: Operations
) -> None:
    summed = tiny_spec().model_copy(update={"federation": "masked", "method": "fedprobe", "summed": (Part.STATISTICS,)})
    add_federation(home, "masked", spec=summed, method="fedprobe", policy=policy_of(3, 5))
    with pytest.raises(SteeringError) as refused:
        doing.change_policy("masked", {"min_clients": 3})
    assert str(refused.value).endswith(f": 1 problem\n  min_clients: {too_few_for_sums(summed, 3)}")
    assert "a sum of fewer than 4 devices shows too much of each: set min_clients = 4 or more" in str(refused.value)
    for federation, least in (("masked", 4), ("casting", 3)):
        assert doing.change_policy(federation, {"min_clients": least}).policy.min_clients == least


def test_a_change_that_is_made_already_is_repeated_without_harm_and_a_new_reason_takes_over(doing: Operations) -> None:
    assert doing.start("casting").status is FederationStatus.RUNNING
    changes: tuple[Callable[..., Any], ...] = (doing.pause, doing.stop)
    for change in changes:
        reasons = [change("casting", reason).status_reason for reason in ("first", "", "second")]
        assert reasons == ["first", "first", "second"]
    assert [doing.archive("casting").status for _ in range(2)] == [FederationStatus.ARCHIVED] * 2
    with pytest.raises(SteeringError, match=r"casting was archived \(second\); `fedcg"):
        doing.resume("casting")


def test_a_federation_that_is_finished_is_changed_by_more_rounds_alone(home: Home, doing: Operations) -> None:
    add_federation(home, "over", spec=tiny_spec(), policy=policy_of(1, 2))
    first = doing.store.aggregates("over")[0]
    doing.store.add_device("a", "aa" * 32, 1.0)
    doing.store.open_attempt("over", RoundAttempt(1, 1), first.artifact, frozenset({"a"}), 1.0, 2.0)
    doing.store.close_attempt(replace(first, round=1, attempt=1))
    refused: tuple[Callable[[str], Any], ...] = (doing.stop, doing.pause, doing.resume)
    for change in refused:
        with pytest.raises(SteeringError, match=r"over is finished: .*`fedcg federation extend over --rounds N`"):
            change("over")
    assert doing.extend("over", 2).policy.rounds == 3


def test_a_device_that_is_no_member_or_never_was_is_neither_disabled_nor_enabled(doing: Operations) -> None:
    doing.store.add_device("b", "bb" * 32, 1.0)
    doing.revoke_device("b", "stolen")
    changes: tuple[Callable[[str], Any], ...] = (doing.disable, doing.enable)
    for change in changes:
        with pytest.raises(SteeringError, match="b is not enrolled; it is revoked"):
            change("b")
        with pytest.raises(NotFoundError, match="no device 'nobody'"):
            change("nobody")
