"""The laws that every method keeps, and the example in docs/how-to/add-a-method.md, installed as a user's own package."""

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from edge_client.config import PolicySection
from edge_client.firewall import check_spec
from fedcg import errors
from fedcg.learning import methods, registry
from fedcg.learning.aggregation.averaging import weighted_average
from fedcg.learning.errors import DataError, ExtensionError, UnknownMethodError
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Aggregate, Callbacks, DivergedError, LabelCounts, LocalResult, TrainingParams
from fedcg.learning.networks.plans import initial_parts, shadow_spec
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.simulation.simulation import Schedule, simulate, update_of
from fedcg.learning.spec import ParameterValue
from fedcg.learning.training.batches import index_blocks, steps_of
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import Part
from tests.support.installed import importable, register
from tests.support.learning import learning_cases as cases

METHODS = method_names()
STILL = {"analytic": frozenset({Part.EXTRACTOR})}
"""Parts that a method's clients have and never train."""


def one_round(name: str, seed: int = 0, round_number: int = 3, **params: ParameterValue) -> LocalResult:
    spec = cases.quick_spec(name, augment_flip=True, **params)
    incoming = get_method(name).init_server(spec, initial_parts(spec, b"cohort")).aggregate
    ctx = cases.context(spec, round_number, f"device {seed}".encode())
    return cases.local_round_of(spec, cases.bright_images(25 + 6 * seed, seed, form=spec.image), incoming, ctx)


def all_tensors(result: LocalResult) -> dict[str, torch.Tensor]:
    both = {"shared": result.shared.parts, "private": result.private.parts}
    return {f"{half}/{p.value}/{n}": t for half, parts in both.items() for p, w in parts.items() for n, t in w.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_local_round_repeats_bit_for_bit_whatever_the_global_random_state(name: str) -> None:
    torch.manual_seed(1)
    first = one_round(name)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = one_round(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert cases.same(all_tensors(first), all_tensors(second))
    assert first.report == second.report


@pytest.mark.parametrize("name", METHODS)
def test_shared_and_private_results_hold_what_the_method_says_in_storage_of_their_own(name: str) -> None:
    method, result = get_method(name), one_round(name)
    assert frozenset(result.shared.parts) == cases.quick_spec(name).shared_in(3)
    assert len(method.params_type.__bases__) == 1, "no diamond of parameters"
    assert frozenset(result.private.parts) == method.payload.parts
    places = [tensor.data_ptr() for tensor in all_tensors(result).values() if tensor.numel()]
    assert len(set(places)) == len(places)
    assert result.report.examples == 25
    assert (result.report.label_counts is not None) == (method.needs.label_counts is not LabelCounts.NEVER)


@pytest.mark.parametrize("name", METHODS)
def test_a_local_round_changes_neither_its_state_nor_the_aggregate_nor_the_data(name: str) -> None:
    spec = cases.quick_spec(name)
    method, initial = get_method(name), initial_parts(spec, b"cohort")
    data = cases.bright_images(24, 0, form=spec.image)
    state, incoming = method.init_client(spec, initial), method.init_server(spec, initial).aggregate
    images = data.images.clone()
    result = method.local_round(state, data, incoming, cases.context(spec))
    again = initial_parts(spec, b"cohort")
    untouched = {**method.init_server(spec, again).aggregate.parts, **method.init_client(spec, again).parts}
    for parts in (state.parts, incoming.parts):
        assert all(cases.same(weights, untouched[part]) for part, weights in parts.items())
    assert torch.equal(data.images, images)
    changed = spec.shared_in(3) | method.payload.private - STILL.get(name, frozenset())
    assert not any(cases.same(result.private.parts[part], untouched[part]) for part in changed)


@pytest.mark.parametrize(
    ("name", "params"),
    [(name, {}) for name in METHODS]
    + [("fedmd_cg", {"aggregation": kind}) for kind in ("average", "kd")]
    + [("fedcg", {"aggregation": kind}) for kind in ("average", "crossed_kd")],
)
def test_order_of_arrival_and_restarts_never_change_the_aggregate(name: str, params: dict[str, ParameterValue]) -> None:
    spec = cases.quick_spec(name, **params)
    updates = {f"c{seed}": update_of(f"c{seed}", one_round(name, seed)) for seed in range(3)}
    outcomes = []
    for arrived in [*permutations(updates), ("c1",)]:
        twice = [client for client in arrived for _ in range(2)]
        outcomes.append(
            cases.merged(cases.aggregator_of(spec), {client: updates[client] for client in (*arrived, *updates)}, twice)
        )
    for other in outcomes[1:]:
        assert other.label_distribution == outcomes[0].label_distribution
        assert cases.same_parts(other.parts, outcomes[0].parts)
    assert frozenset(outcomes[0].parts) == get_method(name).payload.down


@pytest.mark.parametrize("name", [name for name in METHODS if name != "analytic"])  # it has no loss
def test_a_loss_that_is_not_finite_ends_the_round(name: str) -> None:
    with pytest.raises(DivergedError, match="is kept"):
        one_round(name, optimiser="sgd", lr=1e12)


@pytest.mark.parametrize("name", METHODS)
def test_one_image_is_not_enough(name: str) -> None:
    with pytest.raises(DataError, match="at least 2"):
        cases.local_round_of(cases.quick_spec(name), cases.bright_images(1, 0, form=cases.quick_spec(name).image))


def test_an_unknown_method_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(UnknownMethodError, match=r"local.*Did you mean 'fedmd_cg'"):
        get_method("fedmdcg")


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg"])
def test_in_the_first_round_a_client_trains_exactly_as_its_shadow(name: str) -> None:
    result = one_round(name, round_number=1)
    spec = shadow_spec(cases.quick_spec(name, augment_flip=True))
    alone = cases.local_round_of(spec, cases.bright_images(25, 0), ctx=cases.context(spec, 1, b"device 0"))
    for part in (Part.EXTRACTOR, Part.CLASSIFIER):
        assert cases.same(result.private.parts[part], alone.private.parts[part])


def test_steps_override_epochs_and_an_odd_last_batch_counts() -> None:
    assert steps_of(TrainingParams(epochs=3, batch_size=8), 25) == 9  # 24 of 25 rows: a last batch of one is dropped
    assert steps_of(TrainingParams(epochs=3, batch_size=8), 26) == 12
    assert steps_of(TrainingParams(epochs=3, batch_size=8, steps=5), 26) == 5
    blocks = list(index_blocks(26, 8, 6, torch.Generator().manual_seed(0)))
    assert [len(block) for block in blocks] == [26, 16]


def test_fedcg_loads_both_shared_parts_and_fedmd_cg_only_the_classifier() -> None:
    for name, changed in (("fedcg", True), ("fedmd_cg", False)):
        spec = cases.quick_spec(name, gan_lr=1e-12) if name == "fedcg" else cases.quick_spec(name, generator_lr=1e-12)
        initial = initial_parts(spec, b"cohort")
        other = initial_parts(spec.model_copy(update={"seed": 99}), b"cohort")
        incoming = Aggregate({part: other[part] for part in (Part.GENERATOR, Part.CLASSIFIER)})
        result = cases.local_round_of(spec, cases.bright_images(24, 0), incoming)
        key = "body.0.weight"
        source = other if changed else initial
        assert torch.allclose(result.private.parts[Part.GENERATOR][key], source[Part.GENERATOR][key], atol=1e-6)
        moved = result.private.parts[Part.CLASSIFIER]["1.weight"] - other[Part.CLASSIFIER]["1.weight"]
        assert moved.abs().max().item() < 0.02


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg"])
def test_the_downloaded_generator_teaches_from_the_second_round_on(name: str) -> None:
    spec, data = cases.quick_spec(name), cases.bright_images(24, 0)
    one, other = (initial_parts(spec.model_copy(update={"seed": seed}), b"cohort") for seed in (5, 99))
    downloads = [Aggregate({**one, Part.GENERATOR: source[Part.GENERATOR]}) for source in (one, other)]
    for number, expected in ((1, True), (2, False)):
        ctx = cases.context(spec, number)
        first, second = (cases.local_round_of(spec, data, down, ctx).private.parts for down in downloads)
        assert cases.same(first[Part.EXTRACTOR], second[Part.EXTRACTOR]) == expected


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg"])
def test_the_aggregations_are_the_average_and_two_distillations_of_it(name: str) -> None:
    updates = {f"c{seed}": update_of(f"c{seed}", one_round(name, seed)) for seed in range(2)}
    kinds = ("average", "kd", "crossed_kd")
    average, distilled, crossed = (
        cases.merged(cases.aggregator_of(cases.quick_spec(name, aggregation=kind)), updates, ()).parts for kind in kinds
    )
    for part in (Part.GENERATOR, Part.CLASSIFIER):
        clients = [(update.examples, update.parts[part]) for update in updates.values()]
        assert cases.same(average[part], weighted_average(clients))
        assert not cases.same(distilled[part], average[part])
        assert not cases.same(crossed[part], average[part])
        assert not cases.same(crossed[part], distilled[part])


def test_progress_reports_every_phase_of_a_round() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    ctx = cases.context(cases.quick_spec("fedcg"))
    cases.round_of_one_client(
        replace(ctx, callbacks=Callbacks(lambda phase, step, steps: seen.setdefault(phase, []).append((step, steps)))),
        24,
    )
    assert set(seen) == {"classify", "generate", "teacher", "distil"}
    assert all(steps[-1][0] == steps[-1][1] for steps in seen.values())


def documented() -> str:
    text = (Path(__file__).parents[5] / "docs" / "how-to" / "add-a-method.md").read_text()
    (found,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from importable(tmp_path, monkeypatch)


def install(folder: Path, name: str, held: str) -> None:
    text = (Path(methods.__path__[0]) / "fedgh.py").read_text()
    (folder / "our_package.py").write_text(text.replace('name="fedgh"', f'name="{held}"'))
    register(folder, "ours", "fedcg.methods", name, "our_package:METHOD")


def test_an_installed_method_is_listed_and_runs_as_the_built_in_one(folder: Path) -> None:
    install(folder, "our_prototypes", "our_prototypes")
    assert "our_prototypes" in method_names()
    ours, built_in = (
        simulate(cases.party_of(name, ("a", "b"), server_steps=6), Schedule(rounds=2))
        for name in ("our_prototypes", "fedgh")
    )
    assert set(ours.aggregate.parts) == {Part.CLASSIFIER}
    assert cases.same_parts(ours.aggregate.parts, built_in.aggregate.parts)
    assert ours.curves["a"][-1].accuracy_after is not None
    assert not torch.equal(*(ours.states[name].parts[Part.EXTRACTOR]["0.weight"] for name in ("a", "b")))


def test_a_method_of_another_name_than_its_entry_is_refused(folder: Path) -> None:
    install(folder, "our_prototypes", "theirs")
    with pytest.raises(ExtensionError, match="METHOD in our_package:METHOD is named 'theirs'"):
        get_method("our_prototypes")


def test_a_method_with_a_stage_of_its_own_trains_and_what_is_wrong_with_one_is_told(folder: Path) -> None:
    (folder / "our_package.py").write_text(documented())
    register(folder, "ours", "fedcg.methods", "smoothed", "our_package:METHOD")
    assert simulate(cases.party_of("smoothed", ("a", "b")), Schedule(rounds=1)).aggregate.parts.keys() == {
        Part.CLASSIFIER
    }
    method, spec, right = get_method("smoothed"), cases.quick_spec("smoothed"), one_round("smoothed")
    state, shared = method.init_client(spec, initial_parts(spec, b"cohort")), right.shared
    for wrong, problem in (
        (
            replace(right, shared=replace(shared, parts=right.private.parts)),
            "has extractor, which is not in payload.up",
        ),
        (replace(right, shared=replace(shared, parts={})), "lacks classifier"),
        (replace(right, private=replace(right.private, parts=shared.parts)), "lacks extractor in its private half"),
        (replace(right, shared=replace(shared, parts={Part.CLASSIFIER: {}})), r"nothing instead of 1\.bias \[120\]"),
    ):
        told = replace(method, local_round=lambda *_, wrong=wrong: wrong)
        with pytest.raises(ExtensionError, match=problem):
            protected_round(told, state, cases.bright_images(9, 0), None, cases.context(spec))
    for line, mistake, problem in (
        ('Descent("both"', 'Descent("all"', "stage smoothed: a Descent of 'all', but the optimisers are both"),
        (
            "return None if found is None else (found,)",
            "return found",
            "must return a sequence of 1 losses (smoothed cross",
        ),
        ("label_smoothing=", 'reduction="none", label_smoothing=', "the loss of both has the shape [8]; a Descent"),
        ("found = yield", "found = None and", "stage smoothed: its step must yield a Descent"),
        ("AverageAggregator(UP", "AverageAggregator(KEPT", "the aggregator averages extractor, but updates"),
        ("F.cross_entropy", "G.cross_entropy", "NameError: name 'G' is not defined (our_package.py, line 42, in loss)"),
    ):
        (folder / "our_package.py").write_text(documented().replace(line, mistake))
        importlib.reload(sys.modules["our_package"])
        with pytest.raises(Exception) as failed:
            simulate(cases.party_of("smoothed", ("a", "b")), Schedule(rounds=1))
        assert problem in errors.told(failed.value)
    with pytest.raises(ValueError, match="a client's model needs extractor: share it"):
        replace(method, payload=replace(method.payload, private=frozenset()))


def test_a_method_that_seals_what_it_does_not_average_or_alternates_without_statistics_is_refused() -> None:
    payload = get_method("fedper").payload
    with pytest.raises(ValueError, match="sealed parts are averaged: list them in both"):
        replace(payload, sealed=frozenset({Part.CLASSIFIER}))
    with pytest.raises(ValueError, match="alternates needs the part statistics"):
        replace(payload, alternates=True)


def test_a_package_cannot_take_the_name_of_a_built_in_method(folder: Path) -> None:
    spec = cases.quick_spec("local")
    registry.registered.cache_clear()
    install(folder, "fedgh", "fedgh")
    with pytest.raises(ExtensionError, match=r"registers 'fedgh' in fedcg\.methods .* that name is built in"):
        get_method("fedgh")
    refusal = check_spec(spec, PolicySection())
    assert refusal is not None
    assert refusal[0] is DeclineReason.SPEC_REFUSED
    assert "give the entry another name" in refusal[1]
