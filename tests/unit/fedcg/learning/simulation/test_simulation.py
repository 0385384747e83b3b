"""A federation in one process, its measures, and the command that lists methods."""

import subprocess
import sys

import pytest
import torch

from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext, Weights
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.training.evaluation import consistency, evaluate, generator_spread
from fedcg.wire.parts import Part
from tests.support.commands import data_of, run_fedcg
from tests.support.learning.learning_cases import (
    NAMES,
    bright_images,
    context,
    local_round_of,
    party_of,
    quick_spec,
    same_parts,
)


def run(name: str, order: tuple[str, ...] = NAMES, *, shadow: bool = True) -> Simulation:
    return simulate(party_of(name, order), Schedule(rounds=2, shadow=shadow))


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg", "local"])
def test_the_order_of_clients_never_changes_a_federation(name: str) -> None:
    first, second = run(name), run(name, NAMES[::-1], shadow=False)
    for client in NAMES:
        assert same_parts(first.states[client].parts, second.states[client].parts)
        assert [r.accuracy for r in first.curves[client]] == [r.accuracy for r in second.curves[client]]
    assert same_parts(first.aggregate.parts, second.aggregate.parts)


def test_the_shadow_of_any_method_is_the_local_federation_of_the_same_seed() -> None:
    shadowed, alone = run("fedcg"), run("local", shadow=False)
    for client in NAMES:
        assert [r.local_accuracy for r in shadowed.curves[client]] == [r.accuracy for r in alone.curves[client]]
        assert [r.local_validation for r in shadowed.curves[client]] == [r.validation for r in alone.curves[client]]


def test_a_record_has_the_figures_that_there_are() -> None:
    curve = run("local", shadow=False).curves["a"]
    assert [record.round for record in curve] == [1, 2]
    assert curve[0].consistency is None
    assert curve[0].accuracy_after is None
    shadowed = run("fedmd_cg")
    record = shadowed.best("b")
    assert record.validation == max(r.validation or 0.0 for r in shadowed.curves["b"])
    assert record.consistency is not None
    assert record.spread is not None
    assert record.local_accuracy is not None
    assert len(shadowed.aggregate_seconds) == 2
    with pytest.raises(ValueError, match="without shadows"):
        run("fedcg", shadow=False).best_local("a")


def trained() -> tuple[RoundContext, dict[Part, Weights]]:
    spec = quick_spec("fedmd_cg", epochs=20, lr=3e-3, generator_lr=3e-3)
    ctx = context(spec, 1)
    return ctx, dict(local_round_of(spec, bright_images(48, 1), ctx=ctx).private.parts)


def test_a_trained_model_distinguishes_bright_from_dark_and_its_generator_makes_what_it_is_asked_for() -> None:
    ctx, parts = trained()
    outcome = evaluate(ctx.spec, parts, bright_images(30, 2))
    assert outcome.accuracy > 0.9
    assert sum(outcome.correct_per_class) == round(outcome.accuracy * 30)
    assert outcome.images_per_class == (10, 10, 10)
    assert consistency(ctx.spec, parts[Part.CLASSIFIER], parts[Part.GENERATOR], ctx.streams, 100) > 0.9


def test_accuracy_and_loss_are_means_over_images() -> None:
    spec = quick_spec("local")
    parts = initial_parts(spec, b"cohort")
    silent = {name: torch.zeros_like(tensor) for name, tensor in parts[Part.CLASSIFIER].items()}
    outcome = evaluate(spec, {**parts, Part.CLASSIFIER: silent}, bright_images(9, 0))
    # all logits are 0: class 0 is answered always, 3 of 9 are right, the loss is ln 3
    assert outcome.accuracy == pytest.approx(1 / 3)
    assert outcome.loss == pytest.approx(1.098612, abs=1e-5)
    assert outcome.correct_per_class == (3, 0, 0)
    with pytest.raises(DataError, match="no images"):
        evaluate(spec, parts, bright_images(0, 0))


def test_a_generator_whose_features_never_vary_has_no_spread() -> None:
    spec = quick_spec("fedcg")
    parts = initial_parts(spec, b"cohort")
    data, streams = bright_images(30, 0), Streams(b"m")
    whole = generator_spread(spec, parts[Part.EXTRACTOR], parts[Part.GENERATOR], data, streams)
    stuck = {name: torch.zeros_like(tensor) for name, tensor in parts[Part.GENERATOR].items()}
    assert whole > 0.0
    assert generator_spread(spec, parts[Part.EXTRACTOR], stuck, data, streams) == 0.0
    with pytest.raises(DataError, match="no class has two"):
        generator_spread(spec, parts[Part.EXTRACTOR], parts[Part.GENERATOR], data.rows([0]), streams)


def test_the_spread_of_a_generator_is_one_where_it_varies_as_the_extractor_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedcg.learning.training import evaluation

    spec = quick_spec("fedcg")
    parts = initial_parts(spec, b"cohort")
    stream = torch.Generator().manual_seed(0)
    monkeypatch.setattr(evaluation, "extract_features", lambda *_: torch.randn(900, 4, generator=stream))
    monkeypatch.setattr(
        evaluation, "generate", lambda _, noise, labels: 0.5 * torch.randn(len(labels), 4, generator=stream)
    )
    data = ImageSet(torch.zeros(900, 1, 16, 16, dtype=torch.uint8), torch.arange(900) % 3, spec.classes)
    spread = generator_spread(spec, parts[Part.EXTRACTOR], parts[Part.GENERATOR], data, Streams(b"m"))
    assert spread == pytest.approx(0.5, abs=0.03)


def command(*arguments: str) -> str:
    code = (
        "import sys; from fedcg.learning.cli.method_commands import method_app; "
        f"method_app({list(arguments)!r}, standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_methods_are_listed_without_importing_torch() -> None:
    words = command("list").split()
    names, torch_loaded = words[: words.index("Next:")], words[-1]
    assert {"fedcg", "fedmd_cg", "local"} <= set(names)
    assert torch_loaded == "False"
    assert data_of(command("list", "--json")) == names
    assert command("show", "--help").split()[-1] == "False"


def test_a_method_shows_its_parameters_and_what_leaves_the_box() -> None:
    text = run_fedcg("method", "show", "fedmd_cg").stdout
    assert "stays on the box: extractor" in text
    assert "label counts" in text
    masked = run_fedcg("method", "show", "fedprobe").stdout
    assert (
        "statistics: outputs of the private extractor on images that the cohort's secret makes, behind masks" in masked
    )
    assert "  nobody can inspect these numbers one by one: no norm, no comparison\n" in masked
    shown = data_of(run_fedcg("method", "show", "fedcg", "--json").stdout)
    assert shown["private"] == ["discriminator", "extractor"]
    assert shown["params"]["ramp_rounds"]["default"] == 50
