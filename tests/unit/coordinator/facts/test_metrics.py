"""The list of metrics in the docs is that of the program."""

import re
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from coordinator.facts.known import Known
from coordinator.facts.metrics import metrics_text
from tests.support.coordinator.world import MakeWorld
from tests.support.page.crowds import add_crowd

DOCS = Path(__file__).parents[4] / "docs" / "operations.md"
ROW = re.compile(r"^\| `(fedcg_[a-z_]+)` \| ([^|]*) \|", re.MULTILINE)


def test_every_metric_is_in_the_docs_with_its_labels_and_every_one_there_exists(make_world: MakeWorld) -> None:
    world = make_world(rounds=9, clients=())
    add_crowd(world.store, "tiny", 20, 2, time.time())
    known = Known(world.store, lambda record: world.spec, world.root)
    with_service = {"fedcg_messages_refused"}  # counted by running services alone
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics_text(known).decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = {label for sample in family.samples for label in sample.labels}
        assert family.samples or family.name in with_service, family.name
    listed = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(DOCS.read_text())}
    found["fedcg_messages_refused_total"] = {"federation", "reason"}
    assert listed == found


def test_figures_are_those_of_the_database(make_world: MakeWorld) -> None:
    world = make_world(rounds=9, clients=())
    add_crowd(world.store, "tiny", 20, 2, time.time())
    text = metrics_text(Known(world.store, lambda record: world.spec, world.root)).decode()
    assert 'state="collecting"' not in text, "the third round is open, and its attempt is counted when it is over"
    for line in (
        'fedcg_devices{state="enrolled"} 20.0',
        'fedcg_problems_open{kind="no data"} 2.0',
        'fedcg_round{federation="tiny"} 3.0',
        'fedcg_round_seconds{federation="tiny"} 480.0',
        'fedcg_updates_total{federation="tiny",outcome="accepted"} 40.0',
        'fedcg_attempts_total{federation="tiny",state="closed"} 2.0',
        'fedcg_negative_transfer{federation="tiny"} 0.1',
    ):
        assert line in text, line
