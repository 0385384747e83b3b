"""Published figures stay what they are: the committed records' settings still give their specs, and their first round its figures."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.detect import detect
from experiments.data.open import digits_domains
from experiments.data.source import DIGITS, DIGITS_DOMAINS, Source, digits
from experiments.simulation import batch
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import simulated_party
from experiments.simulation.simulation_record import read_records
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.spec import FederationSpec, plan_from_mapping

RUNS = Path(__file__).parents[4] / "experiments" / "records" / "runs"
# Another CPU model, or torch, rounds otherwise; other draws, losses or defaults differ by far more.
LOSS_OFF = 1e-2
IMAGES_OFF = 4
LATER: dict[str, Any] = {"augment_crop": 0, "aggregate_codec": "f32", "with_base": [], "sealed": []}
LATER |= {"sealed_range": None, "alternates": False}
# Parameters of then: the larger federations that they chose a sampled distillation for are distilled exactly, too.
GONE: dict[str, dict[str, Any]] = {"fedcg": {"exact_clients": 32}, "fedmd_cg": {"bank": "auto", "exact_clients": 32}}
WHOLE = (
    "digits-fedcg-f32-f32-seed0",
    "digits-fedmd_cg-f32-f32-seed0",
    "digits-fedmd_cg-i8-delta-f16-seed0",
    "fedcg-table1-digits-domains-relu6x10-fedprox-mu=0.01-seed0",
    "fedcg-table1-digits-domains-relu6x10-feddf-seed0",
    "fedcg-table1-digits-domains-relu6x10-fedgen-seed0",
    "fedcg-table1-digits-domains-relu6x10-fedsplit-seed0",
)


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {DIGITS: digits(), DIGITS_DOMAINS: digits_domains()}


def record_of(name: str) -> dict[str, Any]:
    return dict(json.loads((RUNS / f"{name}.json").read_text()))


def setting_in(record: dict[str, Any]) -> RunSetting:
    known = {name: value for name, value in record["setting"].items() if (name, value) not in batch.GONE}
    setting = RunSetting.model_validate(known)
    gone = GONE.get(setting.method, {})
    return setting.model_copy(update={"params": {name: setting.params[name] for name in setting.params.keys() - gone}})


def party_in(record: dict[str, Any], sources: dict[str, Source]) -> Party:
    setting = setting_in(record)
    return simulated_party(setting, sources[setting.data])


def comparable_rounds(record: dict[str, Any]) -> int:
    """Two where the CPU is the record's; on another model the rounding of the first round has grown beyond any bound in the second."""
    return 2 if detect().cpu_model == record["machine"]["processor"] else 1


def agrees(record: dict[str, Any], party: Party, now: Simulation, column: str, figure: str) -> int:
    """Compare a column of the curves with the rounds that were run; how many figures there were."""
    compared = 0
    for client in record["clients"]:
        for at, mine in enumerate(now.curves.get(client["id"], ())):
            recorded, got = client["curve"][column][at], getattr(mine, figure)
            assert (recorded is None) == (got is None)
            if recorded is not None:
                images = IMAGES_OFF + 1e-3  # records are rounded
                off = LOSS_OFF if column == "loss" else images / len(party.datasets[client["id"]].test)
                assert got == pytest.approx(recorded, abs=off), (client["id"], column, at)
                compared += 1
    return compared


def digest_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digests(spec: FederationSpec, params: dict[str, Any]) -> set[str]:
    """A run's digest by now; of JSON with `GONE`; and of JSON that also had `image`, and lacked later fields at their defaults."""
    values = json.loads(spec.canonical())
    gone = GONE.get(spec.method, {})
    values["params"] |= {name: params.get(name, default) for name, default in gone.items()}
    found = {spec.digest, digest_of(values)}
    values["image"] = {name: value for name, value in values.pop("input").items() if name != "kind"}
    for fields, later in ((values, LATER), (values["network"], {"weights": None, "freeze": "none", "backbones": []})):
        for name in [name for name, default in later.items() if fields[name] == default]:
            del fields[name]
    return found | {digest_of(values)}


def test_every_committed_setting_still_means_the_spec_that_was_run(sources: dict[str, Source]) -> None:
    checked = 0
    for record in read_records(RUNS):
        setting = setting_in(record)
        if setting.data in sources:
            spec = complete_spec(plan_from_mapping(setting.plan(sources[setting.data])))
            assert record["spec"] in digests(spec, record["setting"]["params"]), record["name"]
            checked += 1
    assert checked >= 50


def test_a_committed_runs_first_client_trains_to_the_loss_and_accuracy_recorded(sources: dict[str, Source]) -> None:
    record = record_of("digits-fedmd_cg-f32-f32-seed0")
    party = party_in(record, sources)
    alone = replace(party, datasets={"client-1": party.datasets["client-1"]})
    now = simulate(alone, Schedule(rounds=1, shadow=False))
    assert agrees(record, party, now, "loss", "loss") == 1
    assert agrees(record, party, now, "accuracy", "accuracy") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_first_rounds_of_a_committed_run_give_the_figures_recorded(name: str, sources: dict[str, Source]) -> None:
    record = record_of(name)
    party = party_in(record, sources)
    rounds = comparable_rounds(record)
    now = simulate(party, Schedule(rounds=rounds, shadow=False))
    for column, figure in (("loss", "loss"), ("accuracy", "accuracy"), ("after", "accuracy_after")):
        assert agrees(record, party, now, column, figure) == rounds * len(record["clients"])
