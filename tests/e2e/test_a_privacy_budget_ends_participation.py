"""A device with DP-SGD over a real broker: its ε survives a SIGKILL, reaches the page, and its budget ends its participation."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fedcg.learning.data.image_folder import read_images, split_source
from fedcg.learning.mechanisms.dp_sgd import Spent
from fedcg.learning.privacy import DpSgdSettings
from fedcg.learning.spec import ImageForm
from tests.support.commands import data_of
from tests.support.edge.toml_edit import set_values
from tests.support.page.pages import Reader
from tests.support.stack import CLASSES, Stack

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(280)]
PRIVATE, PLAIN = "site-1", "site-2"
EPOCHS, BATCH = 30, 8
SETTINGS = DpSgdSettings(noise_multiplier=2.0, delta=1e-3)
FORM = ImageForm(mode="L", height=32, width=32, mean=(0.5,), std=(0.5,))


def _epsilon(stack: Stack, rounds: int) -> float:
    root = stack.root / "data" / PRIVATE
    entries = read_images(root, CLASSES, FORM).entries
    rows = list(split_source(root, entries, CLASSES).values()).count("train")
    steps = EPOCHS * -(-rows // BATCH)
    return Spent().with_round(SETTINGS, BATCH / rows, rounds * steps).epsilon(SETTINGS.delta)


def _training(event: dict[str, Any]) -> bool:
    return bool(event["event"] == "progress" and event["phase"] == "classify" and event["step"] > 0)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A finished federation of two rounds; the training process of the private device was killed in the first one."""
    stack = Stack(
        root=tmp_path_factory.mktemp("budget"),
        devices=(PRIVATE, PLAIN),
        method="fedsplit",
        params={"epochs": EPOCHS, "batch_size": BATCH},
        allow_report=("examples", "accuracy", "loss", "health", "epsilon"),
        min_clients=1,
    )
    stack.prepare()
    budget = (_epsilon(stack, 1) + _epsilon(stack, 2)) / 2
    table: dict[tuple[str, str], Any] = {("privacy", "balance"): "none"}
    table |= {("privacy.dp_sgd", "noise_multiplier"): SETTINGS.noise_multiplier}
    table |= {("privacy.dp_sgd", "delta"): SETTINGS.delta, ("privacy.dp_sgd", "budget_epsilon"): round(budget, 3)}
    set_values(stack.config(PRIVATE), table)
    with stack.up(agents=True, observer=()):
        os.kill(stack.wait_event(PRIVATE, _training, "it trains")["pid"], signal.SIGKILL)
        stack.wait_finished()
        yield stack


def test_a_round_that_was_trained_twice_because_of_a_kill_is_published_and_counted_once(stack: Stack) -> None:
    begun = [event["pid"] for event in stack.events(PRIVATE) if event["event"] == "phase_started"]
    assert len(set(begun)) == 2
    record = json.loads((stack.store(PRIVATE) / "privacy.json").read_text())
    assert record["epsilon"] == _epsilon(stack, 1)
    status = data_of(stack.command("agent", "status", "--config", str(stack.config(PRIVATE)), "--json"))
    assert status["privacy_spent"] == f"epsilon {_epsilon(stack, 1):.3g} of {record['budget']:g} at delta 0.001"


def test_a_round_beyond_the_budget_is_declined_before_training_and_the_others_go_on(stack: Stack) -> None:
    declined = [(event["round"], event["reason"]) for event in stack.events(PRIVATE) if event["event"] == "declined"]
    assert declined == [(2, "withheld")]
    assert not any(event.get("round") == 2 and _training(event) for event in stack.events(PRIVATE))
    stored = [
        (event["client"], event["round"]) for event in stack.events("coordinator") if event["event"] == "update_stored"
    ]
    assert sorted(stored) == [(PRIVATE, 1), (PLAIN, 1), (PLAIN, 2)]


def test_the_page_shows_what_was_spent_as_the_device_reports_it(stack: Stack) -> None:
    reader = Reader(stack.api_port).log_in((stack.home / "api.token").read_text().strip())
    shown = reader.get(f"/devices/{PRIVATE}")[1].partition('id="privacy-shapes"')[2].partition("</section>")[0]
    assert f"Privacy spent: epsilon {_epsilon(stack, 1):.3g} of " in shown
    assert "at delta 0.001" in shown
    assert 'id="privacy-shapes"' not in reader.get(f"/devices/{PLAIN}")[1]
