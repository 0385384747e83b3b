"""fedseal and analytic: what their clients exchange, calibrate, vote on and solve."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from fedcg.learning.heads.calibration import calibrated
from fedcg.learning.heads.moments import class_gaussians, feature_moments, moments_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import downloaded_parts, log_prior, protected_round
from fedcg.learning.method import Aggregate, Callbacks, ClientState, Cohort, RoundContext, Weights
from fedcg.learning.methods import fedseal
from fedcg.learning.methods.fedseal import CALIBRATED, OTHER_KIND, TRAINED_FROM, UNUSABLE
from fedcg.learning.networks import load_part
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.spec import FederationSpec, ParameterValue
from fedcg.learning.training.batches import extract_features
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases

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
    cohort = Cohort(Streams(b"cohort").at(spec.federation), votes)
    return replace(cases.context(spec, number), cohort=cohort, validation=validation)


def test_its_averages_are_those_of_fedavg_with_the_same_help() -> None:
    plain, ours = (federation(name) for name in ("fedavg", "fedseal"))
    alike = replace(
        ours, roots=replace(ours.roots, cohort=spec_root(ours.spec.seed))
    )  # extractors start in public, too
    first = [simulate(party, Schedule(rounds=1)).aggregate.parts for party in (plain, alike)]
    assert all(near(first[0][part], first[1][part]) for part in (E, C))


def test_a_round_of_moments_trains_nothing_and_brings_those_of_all_features_of_the_mean_extractor(
    sealed: Simulation,
) -> None:
    party = ours()
    first = simulate(party, Schedule(rounds=1))
    for name, state in first.states.items():
        for kept in (E, C):
            assert cases.same(state.parts[kept], sealed.states[name].parts[kept])
            assert cases.same(first.shadows[name].parts[kept], sealed.shadows[name].parts[kept])
    extractor = load_part(party.spec, E, first.aggregate.parts[E])
    together = [data.train for data in party.datasets.values()]
    features = torch.cat([extract_features(extractor, one.images, party.spec).flatten(1) for one in together])
    wanted = moments_of(features.clamp(0, 16), torch.cat([one.labels for one in together]), 3)
    assert near(sealed.aggregate.parts[S], wanted, 1e-4)


def test_the_calibrated_classifier_is_taken_where_most_vote_for_it_and_the_own_validation_confirms_it(
    sealed: Simulation,
) -> None:
    party = ours()
    own, data = sealed.states["a"].parts, party.datasets["a"]
    classes = class_gaussians(sealed.aggregate.parts[S])
    assert classes is not None
    for votes, number, is_taken in (
        ({"a": CALIBRATED, "b": CALIBRATED, "c": 0}, 3, True),
        ({"a": CALIBRATED, "b": 0, "c": 0}, 3, False),
        ({"a": CALIBRATED, "b": CALIBRATED, "c": CALIBRATED}, 4, False),  # moments of an earlier extractor
    ):
        ctx = asked(party.spec, number, votes, data.val)
        found = fedseal.align(own, sealed.aggregate, data.train, ctx)
        if is_taken:
            assert cases.same(found[C], calibrated(sealed.aggregate.parts[C], classes, ctx))
        else:
            assert found == {}
    spoilt = {**sealed.aggregate.parts, S: {**sealed.aggregate.parts[S], "counts": torch.full((3,), torch.nan)}}
    warnings: list[str] = []
    ctx = replace(asked(party.spec, 3, {"a": CALIBRATED}, data.val), callbacks=Callbacks(warn=warnings.append))
    assert fedseal.align(own, Aggregate(spoilt), data.train, ctx) == {}
    assert "moments of no images: the averaged classifier is used as it came" in warnings[0]


def test_with_balanced_logits_the_calibrated_classifier_gets_the_clients_own_label_shares(sealed: Simulation) -> None:
    party = ours()
    data = party.datasets["a"].train.rows([0, 1, 2, 3, 6, 9])
    ctx = asked(party.spec, 3, {"a": CALIBRATED}, party.datasets["a"].val)
    plain = downloaded_parts(sealed.states["a"].parts, sealed.aggregate, data, ctx)
    adjusted = downloaded_parts(
        sealed.states["a"].parts, sealed.aggregate, data, replace(ctx, privacy=PrivacySettings(balance="logits"))
    )
    difference = adjusted[C]["5.bias"] - plain[C]["5.bias"]
    assert torch.allclose(difference, log_prior(data.label_counts()), atol=1e-5)


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
    newcomer = ClientState(state.parts)
    assert fedseal.vote(newcomer, Aggregate({**sealed.aggregate.parts, E: dead}), data.train, ctx) & UNUSABLE == 0
    assert fedseal.vote(state, Aggregate({**sealed.aggregate.parts, E: dead}), data.train, of_kinds) & OTHER_KIND
    assert fedseal.vote(state, sealed.aggregate, data.train, replace(ctx, validation=None)) == 0
    assert fedseal.vote(state, sealed.aggregate, data.train, replace(ctx, round=1)) == 0


def test_where_the_images_of_half_of_the_clients_differ_in_kind_all_keep_their_own_extractors(
    sealed: Simulation,
) -> None:
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
