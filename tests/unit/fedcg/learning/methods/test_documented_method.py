"""The example in docs/adding-a-method.md is a method: its own file, found by name, and it does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from fedcg.learning import methods, registry
from fedcg.learning.method import Aggregate, Method, Update
from fedcg.learning.networks.initial_weights import initial_parts
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.simulation.simulation import simulate
from fedcg.learning.simulation.state import Schedule
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import (
    bright_images,
    context,
    local_round_of,
    merged,
    party_of,
    quick_spec,
    same,
)

PAGE = Path(__file__).parents[5] / "docs" / "adding-a-method.md"
NAME = "shared_classifier"


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Method:
    """The page's example, as if its file lay in `fedcg/learning/methods/`."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / f"{NAME}.py").write_text(code)
    names = (*method_names(), NAME)
    monkeypatch.setattr(registry, "method_names", lambda: names)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, f"fedcg.learning.methods.{NAME}", raising=False)
    return get_method(NAME)


def test_the_documented_method_averages_classifiers_by_images_and_shares_nothing_else(documented: Method) -> None:
    spec = quick_spec(NAME)
    initial = initial_parts(spec, b"cohort")
    server = documented.init_server(spec, initial)
    assert set(server.aggregate.parts) == documented.shared_up == {Part.CLASSIFIER}
    # (1 * 8 + 3 * 4) / 4 = 5
    updates = {
        name: Update(name, {Part.CLASSIFIER: {"w": torch.tensor([value])}}, images)
        for name, value, images in (("a", 8.0, 1), ("b", 4.0, 3))
    }
    merge = documented.aggregator(server, context(spec), MemorySpill())
    aggregate = merged(merge, updates, "b")
    assert aggregate.parts[Part.CLASSIFIER]["w"].tolist() == [5.0]


def test_the_documented_method_starts_from_the_download_and_stays_near_it_when_asked_to(documented: Method) -> None:
    moved = []
    for proximal in (0.0, 100.0):
        spec = quick_spec(NAME, proximal=proximal)
        other = initial_parts(spec.model_copy(update={"seed": 99}), b"cohort")[Part.CLASSIFIER]
        result = local_round_of(spec, bright_images(24, 0), Aggregate({Part.CLASSIFIER: other}))
        assert same(result.shared.parts[Part.CLASSIFIER], result.private.parts[Part.CLASSIFIER])
        trained = result.private.parts[Part.CLASSIFIER]
        moved.append(sum(float((trained[name] - other[name]).square().sum()) for name in other))
    assert 0.0 < moved[1] < moved[0] < 0.1


def test_the_documented_method_runs_a_federation(documented: Method) -> None:
    done = simulate(party_of(NAME, ("a", "b")), Schedule(rounds=2))
    assert set(done.aggregate.parts) == {Part.CLASSIFIER}
    assert done.curves["a"][-1].accuracy_after is not None
