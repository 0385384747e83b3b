"""`fedcg bench privacy`: plants are in the update that is attacked, null audits hold nothing that was trained on, and rates are counted right."""

import json
from pathlib import Path

import pytest
import tomllib
import torch

import audit
from audit.attacks.attack import Effort
from audit.evidence import inputs_and_features
from audit.recording.leakage import WireTensor, compare, private_tensors
from experiments.bench import privacy_audits
from experiments.bench.planted_leaks import PLANTS, as_sent
from experiments.bench.privacy_audits import lines, missed, rates, smallest, swapped, write_detection
from experiments.record import bench_record
from fedcg.learning.seeds import Streams
from fedcg.wire.parts import Part
from tests.support.audit import WITH_GENERATOR, simulated_case, write_images, write_private
from tests.support.commands import data_of, run_fedcg

FOUND = {"scaled rows", "coded rows", "image in columns"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTS)
def test_a_strong_plant_changes_the_update_and_a_copy_is_found_in_it_as_it_is_sent(kind: str, tmp_path: Path) -> None:
    case, plant = simulated_case(**WITH_GENERATOR), PLANTS[kind]
    private = write_private(case, tmp_path / "private.safetensors")
    images = write_images(case.truth.train, None, tmp_path / "data.npz")
    secrets = private_tensors([private]) + inputs_and_features(case.view.spec, images, [private])

    def found(number: float) -> set[str]:
        planted = plant.put(case, number, torch.Generator().manual_seed(5))
        named = [(part, name, one) for part, some in planted.view.update.items() for name, one in some.items()]
        before = [(part, name, one) for part, some in case.view.update.items() for name, one in some.items()]
        pairs = zip(named, before, strict=True)
        assert {part for (part, _, new), (*_, old) in pairs if not torch.equal(new, old)} == {
            Part.CLASSIFIER if "class" in kind else Part.GENERATOR
        }
        sent = as_sent(planted).view.update.values()
        wire = [WireTensor("", name, one.numpy()) for some in sent for name, one in some.items()]
        names = [match.private for match in compare(wire, secrets)]
        return {name.rpartition("/")[0] or name.rpartition(" ")[0] for name in names}

    wanted = {"image in columns": {"input"}}.get(kind, {"after/extractor"})
    assert wanted & found(plant.strengths[-1]) == (wanted if kind in FOUND else set())


def test_a_null_audit_has_only_images_of_the_pool_and_draws_them_anew_for_each_seed() -> None:
    case = simulated_case(**WITH_GENERATOR)
    pool = case.truth.held_out.rows(range(60))
    drawn = []
    for seed in (1, 1, 2):
        null = swapped(case.__class__(case.view, case.truth, Streams(bytes([seed] * 32))), pool).truth
        both = torch.cat([null.train.images, null.held_out.images]).flatten(1)
        assert sorted(both.tolist()) == sorted(pool.images.flatten(1).tolist())
        counts = [some.label_counts() for some in (null.train, null.held_out)]
        assert all(mine <= rest for mine, rest in zip(*counts, strict=True))
        drawn.append(null.train.images.flatten(1).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def row(strength: float, value: float, *, is_red: bool) -> dict[str, object]:
    return {
        "group": {"size": 100, "plant": "overfit classifier", "strength": strength}, "seed": 0, "images": 90,
        "tried": ["compare", "membership", "reidentification"], "red": ["membership"] * is_red, "figures": {"mia_auc": value},
    }  # fmt: skip


def test_the_smallest_leak_is_interpolated_where_four_of_five_plants_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(0, 0.6, is_red=at < 12) for at in range(20)] + [row(20, 0.7, is_red=True) for _ in range(20)]
    (found,) = smallest(rates(rows))
    # 60 % at 0.6 and 100 % at 0.7: 80 % half-way.
    assert found == {"attack": "membership", "images": 90, "figure": "mia_auc", "leak": 0.65, "plants": 20}
    assert list(smallest(rates(rows[1:]))) == [{**found, "leak": 0.7}]  # too few at the weaker strength
    assert list(missed(rates(rows[:20]))) == [
        {"attack": name, "images": 90, "plant": "overfit classifier", "found": count, "of": 20}
        for name, count in (("membership", 12), ("reidentification", 0))
    ]
    line = "| overfit classifier 0, 90 images | membership | 12 of 20 | 36% to 81% | mia_auc 0.6 |"
    assert line in list(lines(rates(rows)))
    monkeypatch.setattr(audit, "__file__", str(tmp_path / "__init__.py"))
    alarm, place = {"attack": "labels", "red": 1, "of": 50}, tmp_path / "detection.toml"
    place.write_text("# A comment.\nsmallest = []\nfalse_alarm = []\n")
    for table, written in (("smallest", found), ("false_alarm", alarm), ("smallest", found)):
        write_detection(Effort.QUICK, table, [written])
    assert place.read_text().startswith("# A comment.\n")
    effort = {"effort": "quick"}
    assert tomllib.loads(place.read_text()) == {"smallest": [{**found, **effort}], "false_alarm": [{**alarm, **effort}]}


@pytest.mark.slow
def test_a_bench_resumes_and_finds_scaled_rows(tmp_path: Path) -> None:
    words = ("bench", "privacy", "plants", "--images", 60, "--plant", "scaled rows", "--federations", 1, "--json")
    for count in (1, 2):
        record = data_of(run_fedcg(*words, "--count", count, "--out", tmp_path).stdout)
        assert [one["red"] for one in record["rates"]] == [{"compare": 0}, {"compare": count}, {"compare": count}]
    assert len(json.loads((tmp_path / "plants-quick.json").read_text())["rows"]) == 6
    update = privacy_audits.recordings(tmp_path, 1, 60)[0]
    assert privacy_audits.default_case(update, 0).view.report.label_counts is None


def test_a_bench_adds_nothing_to_a_record_of_another_version(tmp_path: Path) -> None:
    file = tmp_path / "plants-quick.json"
    file.write_text(json.dumps({**bench_record("bench privacy plants", {}), "versions": {}, "rows": []}))
    ended = run_fedcg("bench", "privacy", "plants", "--out", tmp_path, "--json")
    assert (ended.exit_code, json.loads(file.read_text())["rows"]) == (1, [])
    assert "with other versions: choose another --out" in ended.output
