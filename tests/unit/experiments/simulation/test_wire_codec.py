"""A simulation with codecs: both sides go on from what the wire would bring, and the record shows its bytes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.parallel.pool_runner import PoolRunner
from experiments.simulation.party_builder import WireCoding, coding_of
from fedcg.learning.method import DivergedError, Weights
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, simulate
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import AggregateCodec, Part, UpdateCodec
from tests.support.commands import data_of, run_fedcg
from tests.support.learning.learning_cases import party_of, plan, same_parts


def coded(method: str, codec: UpdateCodec = "i8-delta", aggregate_codec: AggregateCodec = "f16") -> Party:
    spec = spec_of(method, codec, aggregate_codec)
    return replace(party_of(method), spec=spec, coding=coding_of(spec))


def spec_of(method: str, codec: UpdateCodec, aggregate_codec: AggregateCodec) -> FederationSpec:
    chosen = {"codec": codec, "aggregate_codec": aggregate_codec}
    return complete_spec(plan(method).model_copy(update=chosen))


@pytest.mark.parametrize("method", ["fedcg", "fedmd_cg", "fedavg", "fedgen"])
def test_the_aggregate_is_one_that_the_wire_brings_unchanged(method: str) -> None:
    one = coded(method)
    assert one.coding is not None
    done = simulate(one, Schedule(rounds=2, shadow=False))
    again, _ = one.coding.aggregate(done.aggregate.parts)
    assert same_parts(done.aggregate.parts, again)
    assert len(done.update_bytes) == 2
    assert not done.failures


def test_the_server_gets_the_decoded_updates_and_the_client_keeps_its_own() -> None:
    one = coded("fedavg", "i8-delta", "f32")
    assert one.coding is not None
    done = simulate(one, Schedule(rounds=1, shadow=False))
    exact = simulate(replace(one, coding=None), Schedule(rounds=1, shadow=False))
    for name in one.datasets:
        assert same_parts(done.states[name].parts, exact.states[name].parts)
    assert not same_parts(done.aggregate.parts, exact.aggregate.parts)
    for part, weights in exact.aggregate.parts.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(done.aggregate.parts[part][name], tensor, atol=1e-3, rtol=0)


def test_without_codecs_nothing_is_touched_and_the_spec_keeps_its_name() -> None:
    spec = spec_of("fedavg", "f32", "f32")
    assert coding_of(spec) is None
    assert b"aggregate_codec" not in spec.canonical()
    assert b"with_base" not in spec.canonical()
    assert simulate(replace(party_of("fedavg"), spec=spec), Schedule(rounds=1)).update_bytes == ()


def test_a_coding_of_plain_numbers_changes_none() -> None:
    spec = spec_of("fedcg", "f32", "f32")
    parts = initial_parts(spec, b"cohort")
    shared = {part: parts[part] for part in spec.upload}
    back, size = WireCoding(spec).update("a", shared, shared)
    assert same_parts(shared, back)
    assert size > 50_000


@pytest.mark.slow
def test_processes_give_the_same_numbers() -> None:
    one, schedule = coded("fedavg"), Schedule(rounds=1, shadow=False)
    runner = PoolRunner(2)
    try:
        many = simulate(one, schedule, runner=runner)
    finally:
        runner.close()
    assert same_parts(many.aggregate.parts, simulate(one, schedule).aggregate.parts)


class Refusing:
    """A coding that can't code one client's updates."""

    def aggregate(self, parts: Mapping[Part, Weights]) -> tuple[Mapping[Part, Weights], int]:
        return parts, 7

    def update(
        self, client: str, parts: Mapping[Part, Weights], base: Mapping[Part, Weights]
    ) -> tuple[Mapping[Part, Weights], int]:
        if client == "c":
            raise DivergedError("too large")
        return parts, 7


def test_a_client_whose_update_can_not_be_coded_keeps_its_state_and_the_others_go_on() -> None:
    one = replace(party_of("fedavg"), coding=Refusing())
    done = simulate(one, Schedule(rounds=1, shadow=False))
    without = simulate(party_of("fedavg", ("a", "b")), Schedule(rounds=1, shadow=False))
    assert [failure.reason for failure in done.failures["c"]] == ["too large"]
    assert same_parts(done.aggregate.parts, without.aggregate.parts)
    assert done.update_bytes == (7,)


def test_what_float16_can_not_hold_is_a_divergence() -> None:
    spec = spec_of("fedavg", "f16", "f16")
    parts = initial_parts(spec, b"cohort")
    huge = {part: {name: tensor * 1e9 for name, tensor in parts[part].items()} for part in spec.upload}
    with pytest.raises(DivergedError, match="the update can't be coded"):
        WireCoding(spec).update("a", huge, huge)


def test_the_record_shows_the_bytes_of_an_update_as_it_is_coded(tmp_path: Path) -> None:
    words = "--clients 2 --images-per-client 40 --rounds 1 --local-epochs 1 --method fedsplit --no-shadow --workers 1"
    runs = {}
    for codec, down in (("f32", "f32"), ("i8-delta", "f16")):
        more = f"--codec {codec} --aggregate-codec {down} --no-plot --no-tensorboard --json --out {tmp_path / codec}"
        done = run_fedcg("simulate", *f"{words} {more}".split())
        assert done.exit_code == 0, done.stderr
        (runs[codec],) = data_of(done.stdout)["runs"]
    weights, exact, scales = 48000 + 10080 + 840, 120 + 84 + 10, 120 + 84 + 10  # LeNet-5's classifier
    assert runs["f32"]["bytes"] == {"up": 4 * (weights + exact), "down": 4 * (weights + exact), "up_artifact": None}
    sizes = runs["i8-delta"]["bytes"]
    assert (sizes["up"], sizes["down"]) == (weights + 4 * (exact + scales), 2 * weights + 4 * exact)
    assert 40_000 < sizes["up_artifact"] < 65_000
    assert (runs["i8-delta"]["setting"]["codec"], runs["i8-delta"]["setting"]["aggregate_codec"]) == ("i8-delta", "f16")
