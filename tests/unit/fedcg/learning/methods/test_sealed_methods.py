"""fedseal and analytic: what their clients exchange, calibrate, vote on and solve."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fedcg.learning.errors import NetworkError, PrivacyError
from fedcg.learning.heads.classifiers import USUAL_TEMPERATURE, calibrated, lda_head
from fedcg.learning.heads.moments import class_gaussians, feature_moments, moments_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import check_mechanisms, downloaded_parts, log_prior, protected_round
from fedcg.learning.method import Aggregate, Callbacks, ClientState, Cohort, RoundContext, Weights
from fedcg.learning.methods import fedseal
from fedcg.learning.methods.fedseal import CALIBRATED, JUDGED, OTHER_KIND, TRAINED_FROM, UNUSABLE
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.spec import BackboneChoice, FederationSpec, NetworkChoice, ParameterValue
from fedcg.learning.split_names import WEIGHTS_VARIABLE
from fedcg.learning.training.batches import extract_features
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.learning.networks import tiny_plan, write_tiny_weights
from tests.support.present import present

E, C, S = Part.EXTRACTOR, Part.CLASSIFIER, Part.STATISTICS


def federation(name: str = "fedseal", **params: ParameterValue) -> Party:
    """Three clients that train long enough to know their classes; none finds that its nine validation images differ in kind."""
    return cases.party_of(name, cases.NAMES, aux=1.0, ema=0.998, server_momentum=0.3, epochs=8, lr=3e-3, **params)


def ours() -> Party:
    return federation(other_kind=1e3)


@pytest.fixture(scope="module")
def sealed() -> Simulation:
    """Two rounds of fedseal: one that trains, one of moments."""
    return simulate(ours(), Schedule(rounds=2))


def near(one: Weights, other: Weights, atol: float = 1e-5) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=atol) for name in one)


def asked(spec: FederationSpec, number: int, votes: Mapping[str, int], validation: ImageSet | None) -> RoundContext:
    judged = {name: given | fedseal.JUDGED for name, given in votes.items()}
    cohort = Cohort(Streams(b"cohort").at(spec.federation), judged)
    return replace(cases.context(spec, number), cohort=cohort, validation=validation)


def test_its_averages_are_those_of_fedavg_with_the_same_help() -> None:
    plain, ours = (federation(name) for name in ("fedavg", "fedseal"))
    alike = replace(ours, roots=replace(ours.roots, cohort=spec_root(ours.spec.seed)))  # extractors start in public
    first = [simulate(party, Schedule(rounds=1)).aggregate.parts for party in (plain, alike)]
    assert all(near(first[0][part], first[1][part]) for part in (E, C))


def test_a_round_of_moments_trains_nothing_and_brings_those_of_the_mean_extractors_features(sealed: Simulation) -> None:
    party = ours()
    first = simulate(party, Schedule(rounds=1))
    for name, state in first.states.items():
        for kept in (E, C):
            assert cases.same(state.parts[kept], sealed.states[name].parts[kept])
            assert cases.same(first.shadows[name].parts[kept], sealed.shadows[name].parts[kept])
    newcomer = get_method("fedseal").init_client(party.spec, initial_parts(party.spec, b"cohort"))
    ctx = party.client_context("a", 2)
    joined = get_method("fedseal").local_round(newcomer, party.datasets["a"].train, first.aggregate, ctx).private
    assert cases.same(joined.parts[E], first.aggregate.parts[E]), "who never trained uses the mean"
    extractor = load_part(party.spec, E, first.aggregate.parts[E])
    together = [data.train for data in party.datasets.values()]
    features = torch.cat([extract_features(extractor, one.images, party.spec).flatten(1) for one in together])
    wanted = moments_of(features.clamp(0, 32), torch.cat([one.labels for one in together]), 3)
    assert near(sealed.aggregate.parts[S], wanted, 1e-4)


def test_the_calibrated_classifier_is_taken_where_most_votes_are_for_it_and_computed_once(
    sealed: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    party, count = ours(), Mock(side_effect=calibrated)
    monkeypatch.setattr(fedseal, "calibrated", count)
    fedseal._LATEST.clear()
    lr = fedseal.FedsealParams.model_validate(party.spec.params).lr
    own, data = sealed.states["a"].parts, party.datasets["a"]
    classes = present(class_gaussians(sealed.aggregate.parts[S]))
    for votes, number, is_taken in (
        ({"a": CALIBRATED, "b": CALIBRATED, "c": 0}, 3, True),
        ({"a": CALIBRATED, "b": 0, "c": 0}, 3, False),
        ({"a": CALIBRATED, "b": CALIBRATED, "c": CALIBRATED}, 4, False),  # moments of an earlier extractor
    ):
        ctx = asked(party.spec, number, votes, data.val)
        found = fedseal.align(own, sealed.aggregate, data.train, ctx)
        if is_taken:
            assert cases.same(found[C], calibrated(sealed.aggregate.parts[C], classes, lr, ctx))
        else:
            assert found == {}
    assert count.call_count == 1
    cohort = replace(ctx.cohort, streams=Streams(b"another").at(ctx.spec.federation))
    other = replace(asked(party.spec, 3, {"a": CALIBRATED}, data.val), cohort=cohort)
    fedseal.align(own, sealed.aggregate, data.train, other)
    assert count.call_count == 2, "another secret, another classifier"
    spoilt = {**sealed.aggregate.parts, S: {**sealed.aggregate.parts[S], "counts": torch.full((3,), torch.nan)}}
    warnings: list[str] = []
    ctx = replace(asked(party.spec, 3, {"a": CALIBRATED}, data.val), callbacks=Callbacks(warn=warnings.append))
    assert fedseal.align(own, Aggregate(spoilt), data.train, ctx) == {}
    assert "moments are of no images: the averaged classifier is used without calibration" in warnings[0]


def test_with_balanced_logits_the_calibrated_classifier_gets_the_clients_own_label_shares(sealed: Simulation) -> None:
    party = ours()
    data = party.datasets["a"].train.rows([0, 1, 2, 3, 6, 9])
    ctx = asked(party.spec, 3, {"a": CALIBRATED}, party.datasets["a"].val)
    plain = downloaded_parts(sealed.states["a"].parts, sealed.aggregate, data, ctx)
    adjusted = downloaded_parts(
        sealed.states["a"].parts, sealed.aggregate, data, replace(ctx, privacy=PrivacySettings(balance="logits"))
    )
    assert torch.allclose(adjusted[C]["5.bias"] - plain[C]["5.bias"], log_prior(data.label_counts()), atol=1e-5)


def test_an_extractor_that_most_clients_can_not_use_is_taken_back_by_all(sealed: Simulation) -> None:
    party = ours()
    state, data = sealed.states["a"], party.datasets["a"].train
    stream = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(one.shape, generator=stream) for name, one in sealed.aggregate.parts[E].items()}
    spoilt = Aggregate({**sealed.aggregate.parts, E: noise})
    good = Aggregate({part: state.extras[TRAINED_FROM + part.value] for part in (E, C)})
    method, most = get_method("fedseal"), {"a": UNUSABLE, "b": UNUSABLE, "c": 0}
    wanted = method.local_round(state, data, good, asked(party.spec, 3, {}, None))
    taken_back = method.local_round(state, data, spoilt, asked(party.spec, 3, most, None))
    assert cases.same(taken_back.shared.parts[E], wanted.shared.parts[E])
    assert cases.same(taken_back.private.extras[TRAINED_FROM + E.value], good.parts[E])
    other = {
        name: given | (given and OTHER_KIND) for name, given in most.items()
    }  # `align` keeps the own extractor then
    both = protected_round(method, state, data, spoilt, asked(party.spec, 3, other, None))
    assert cases.same(both.private.extras[TRAINED_FROM + E.value], good.parts[E])
    kept = method.local_round(state, data, spoilt, asked(party.spec, 3, {"a": UNUSABLE, "b": 0, "c": 0}, None))
    assert not cases.same(kept.shared.parts[E], wanted.shared.parts[E])


def test_a_client_votes_against_a_useless_extractor_and_for_a_calibrated_classifier(sealed: Simulation) -> None:
    party = ours()
    data = party.datasets["a"]
    ctx = asked(party.spec, 3, {}, cases.bright_images(30, 8))
    of_kinds = replace(ctx, spec=federation().spec)
    dead = {name: torch.zeros_like(one) for name, one in sealed.aggregate.parts[E].items()}
    before = {TRAINED_FROM + part.value: sealed.aggregate.parts[part] for part in (E, C)}
    state = replace(sealed.states["a"], extras=before)
    assert fedseal.vote(state, sealed.aggregate, data.train, ctx) & UNUSABLE == 0
    assert fedseal.vote(state, Aggregate({**sealed.aggregate.parts, E: dead}), data.train, ctx) & UNUSABLE
    head = fedseal.align(state.parts, sealed.aggregate, data.train, ctx)[C]  # of far smaller loss than the average
    calibrated = replace(state, extras={**before, TRAINED_FROM + C.value: head})
    assert fedseal.vote(calibrated, sealed.aggregate, data.train, ctx) & UNUSABLE == 0
    newcomer = ClientState(state.parts)
    assert fedseal.vote(newcomer, Aggregate({**sealed.aggregate.parts, E: dead}), data.train, ctx) & UNUSABLE == 0
    assert fedseal.vote(state, Aggregate({**sealed.aggregate.parts, E: dead}), data.train, of_kinds) & OTHER_KIND
    beyond = {name: one * 0 + 3e38 for name, one in sealed.aggregate.parts[C].items()}
    assert fedseal.vote(state, Aggregate({**sealed.aggregate.parts, C: beyond}), data.train, ctx) & UNUSABLE
    assert fedseal._share({"a": UNUSABLE | JUDGED, "b": UNUSABLE | JUDGED, "c": 0, "d": 0}, UNUSABLE) == 1.0
    assert fedseal._share({"a": UNUSABLE | JUDGED, "b": 0, "c": 0, "d": 0}, UNUSABLE) == 0.0
    assert fedseal.vote(state, sealed.aggregate, data.train, replace(ctx, validation=None)) == 0
    assert fedseal.vote(state, sealed.aggregate, data.train, replace(ctx, round=1)) == 0


def test_other_label_shares_are_no_other_kind_of_images(sealed: Simulation) -> None:
    party = federation()
    down, rows = sealed.aggregate.parts, list(range(0, 24, 3))
    ones, mixed = party.datasets["a"].train.rows(rows), party.datasets["a"].val
    flat = {**down[C], "5.weight": 0.0 * down[C]["5.weight"], "5.bias": torch.zeros(3)}  # says nothing
    state = ClientState({E: down[E], C: {**flat, "5.bias": log_prior(ones.label_counts())}})
    for validation, is_other in ((ones, False), (mixed, True)):
        better = state if validation is ones else sealed.states["a"]
        ctx = asked(party.spec, 3, {}, validation)
        assert bool(fedseal.vote(better, Aggregate({E: down[E], C: flat}), ones, ctx) & OTHER_KIND) == is_other


def test_where_the_images_of_half_the_clients_differ_in_kind_all_keep_own_extractors(sealed: Simulation) -> None:
    party = ours()
    state, data = sealed.states["a"], party.datasets["a"].train
    for votes, is_kept in (({"a": OTHER_KIND, "b": 0}, True), ({"a": OTHER_KIND, "b": 0, "c": 0}, False)):
        found = protected_round(
            get_method("fedseal"), state, data, sealed.aggregate, asked(party.spec, 2, votes, party.datasets["a"].val)
        )
        extractor = state.parts[E] if is_kept else sealed.aggregate.parts[E]
        wanted = feature_moments(load_part(party.spec, E, extractor), data, cases.context(party.spec))
        assert cases.same(found.shared.parts[S], wanted)
        trained = protected_round(
            get_method("fedseal"), state, data, sealed.aggregate, asked(party.spec, 3, votes, None)
        )
        assert (TRAINED_FROM + E.value in trained.private.extras) != is_kept


def test_a_client_goes_on_from_its_own_extractor_where_no_sum_came(sealed: Simulation) -> None:
    party = ours()
    without = Aggregate({C: sealed.aggregate.parts[C]})
    state, data = sealed.states["a"], party.datasets["a"].train
    ctx = asked(party.spec, 3, {"a": CALIBRATED | OTHER_KIND}, party.datasets["a"].val)
    found = protected_round(get_method("fedseal"), state, data, without, ctx)
    assert cases.same(found.private.extras[TRAINED_FROM + E.value], state.parts[E])


def dealt(party: Party, order: torch.Tensor) -> Party:
    """The same federation, its training images dealt in another order."""
    sets = [data.train for data in party.datasets.values()]
    images, labels = torch.cat([one.images for one in sets])[order], torch.cat([one.labels for one in sets])[order]
    parts = zip(party.datasets.items(), images.split(len(sets[0])), labels.split(len(sets[0])), strict=True)
    datasets = {name: replace(data, train=ImageSet(some, of, cases.CLASSES)) for (name, data), some, of in parts}
    return replace(party, datasets=datasets)


def test_analytic_heads_are_those_of_pooled_features_with_the_own_prior_whoever_has_which_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_tiny_weights(tmp_path)
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(weights))
    spec = complete_spec(tiny_plan("analytic", weights))
    datasets = {name: cases.client_data(name, form=spec.image) for name in cases.NAMES}
    party = Party(spec, datasets, cases.roots_from_seed(0, cases.NAMES))
    sorted_by_class = dealt(party, torch.cat([data.train.labels for data in party.datasets.values()]).argsort())
    ends = [simulate(one, Schedule(rounds=1, shadow=False)) for one in (party, sorted_by_class)]
    first, other = (end.aggregate.parts[S] for end in ends)
    assert near(first, other)
    extractor = load_part(party.spec, E, ends[0].states["a"].parts[E])
    together = [data.train for data in party.datasets.values()]
    features = torch.cat([extract_features(extractor, one.images, party.spec) for one in together])
    pooled = present(class_gaussians(moments_of(features, torch.cat([one.labels for one in together]), 3)))
    data = sorted_by_class.datasets["a"]
    assert data.train.label_counts() == (24, 0, 0)
    ctx = replace(sorted_by_class.client_context("a", 2), validation=None)
    head = downloaded_parts({E: extractor.state_dict()}, Aggregate({S: other}), data.train, ctx)[C]
    wanted = lda_head(pooled, log_prior((24, 0, 0)), 0.5, USUAL_TEMPERATURE, "1.")
    assert near(head, wanted, 5e-3 * float(wanted["1.weight"].abs().max()))  # sums have 27 bits
    # A client's own head, of fewer images, is shrunk more.
    state = ends[0].states["a"]
    ctx = replace(party.client_context("a", 1), validation=None)
    own = present(class_gaussians(state.parts[S]))
    prior = log_prior(datasets["a"].train.label_counts())
    found = protected_round(get_method("analytic"), state, datasets["a"].train, None, ctx).private.parts[C]
    assert near(found, lda_head(own, prior, 0.9, USUAL_TEMPERATURE, "1."), 1e-5)


def test_of_all_methods_analytic_alone_is_exact_on_what_is_summed() -> None:
    specs = {name: complete_spec(cases.usual_plan(name)) for name in method_names()}
    assert [name for name, spec in specs.items() if spec.is_exact] == ["analytic"]


def test_analytic_passes_the_pooled_features_of_a_backbone_on() -> None:
    image = get_method("analytic").example.image
    spec = complete_spec(cases.plan("analytic", NetworkChoice(split="timm:test_efficientnet+project:300"), image))
    start = get_method("analytic").init_client(spec, initial_parts(spec, b"cohort")).parts[E]
    pooled = start["project.weight"].shape[1]
    assert pooled < 300
    assert torch.equal(start["project.weight"], torch.eye(300, pooled))
    assert not start["project.bias"].any()


def test_analytic_refuses_classifiers_of_several_layers_and_backbones_that_differ() -> None:
    with pytest.raises(NetworkError, match=r"lenet5_relu has several layers: choose a backbone"):
        complete_spec(cases.plan("analytic", NetworkChoice(split="lenet5_relu")))
    two = NetworkChoice(split="timm:test_efficientnet+project:8", backbones=(BackboneChoice(name="timm:test_resnet"),))
    with pytest.raises(NetworkError, match=r"the same features: leave network\.backbones out"):
        complete_spec(cases.plan("analytic", two, get_method("analytic").example.image))


@pytest.mark.parametrize("name", ["fedseal", "analytic"])
@pytest.mark.parametrize("wrong", [{"update_clip": 1.0}, {"update_noise": 0.01}, {"prune": 0.5}, {"balance": "bias"}])
def test_mechanisms_that_would_spoil_moments_or_their_head_are_refused(name: str, wrong: dict[str, Any]) -> None:
    spec = federation().spec
    with pytest.raises(PrivacyError, match="would distort the statistics"):
        check_mechanisms(spec, get_method(name), PrivacySettings(**wrong))
