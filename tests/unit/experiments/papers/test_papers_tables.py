"""`fedcg tables`: hand-made records beside the published figures, orders over seeds, the worst client."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.papers.catalogue import Published
from experiments.papers.comparison import Comparison, Judgement, compare, judge
from experiments.papers.figures import Figure, Line, is_far
from experiments.papers.records import RunRecord
from experiments.papers.sheets import comparison_sheet, gains_sheet, orders_sheet
from tests.support.commands import data_of, run_fedcg

CIFAR = "fedcg:table1:cifar10-4"

OWN = "own:iid:cifar10-4x500"


def _cells(shown: str) -> str:
    return re.sub(r"\s*[│┃]\s*", " | ", shown)


def record(
    method: str,
    seed: int,
    personal: float,
    *,
    local: float | None = None,
    last: float | None = None,
    after: float | None = None,
    whole: float | None = None,
    validation: Sequence[float | None] = (0.4,),
    generator: str = "conv",
    network: str = "lenet5",
    **fields: Any,
) -> dict[str, Any]:
    """One run of two clients; accuracies are shares of 1, the second client is 0.02 above the first; `fields` of the record."""
    clients: list[dict[str, Any]] = [
        {
            "id": f"client-{number}",
            "accuracy_personal": personal + shift,
            "accuracy_local": local,
            "below_local": None if local is None else personal + shift < local,
            "curve": {"validation": list(validation)},
        }
        for number, shift in ((1, -0.01), (2, 0.01))
    ]
    head = {"format": 2, "kind": "simulation", "date": "2026-01-01", "paper": CIFAR, "reduced": {}, "variant": ""}
    mean = {"accuracy_personal": personal, "accuracy_local": local, "accuracy_last": last, "accuracy_after": after}
    return {
        **head,
        "method": method,
        "seed": seed,
        "data": "cifar10",
        "partition": "iid",
        "rounds": 100,
        "setting": {"rounds": 100, "lr": 3e-4, "generator": generator, "seed": seed},
        "params": {},
        "network": {"split": network, "generator": generator, "discriminator": generator, "noise_dim": 100},
        "mean": {**mean, "global_accuracy_last": whole, "global_accuracy_best": whole},
        "clients": clients,
        **fields,
    }


def write(folder: Path, *records: dict[str, Any]) -> None:
    """Write records into a folder, numbered."""
    for number, content in enumerate(records):
        (folder / f"run-{number:03d}.json").write_text(json.dumps(content))


W10 = "fedmd_cg:table1:cifar10-w10"


def _runs(*records: dict[str, object]) -> list[RunRecord]:
    return [RunRecord.model_validate({**content, "file": f"{number}.json"}) for number, content in enumerate(records)]


def _only(*records: dict[str, object]) -> Comparison:
    (found,) = compare(_runs(*records))
    return found


def _line(found: Comparison, key: str) -> Line:
    (line,) = [line for line in found.lines if line.row.key == key]
    return line


def _fedmd_cg(personal: float, paper: str = W10, variant: str = "lr=0.05", **more: Any) -> dict[str, Any]:
    return record("fedmd_cg", 0, personal, paper=paper, variant=variant, setting={"lr": 0.05}, **more)


def _row(found: Comparison, label: str) -> tuple[str, ...]:
    return next(row for row in comparison_sheet(found).rows if row[0] == label)


def test_the_mean_over_seeds_and_its_sample_deviation_stand_beside_the_paper() -> None:
    # Mean of 47, 48, 52 is 49; squared distances 4 + 1 + 9 = 14, over n - 1 = 2: variance 7.
    found = _only(*(record("fedcg", seed, value) for seed, value in ((0, 0.47), (1, 0.48), (2, 0.52))))
    figure = _line(found, "fedcg").figures["personal"]
    assert (figure.seeds, figure.mean, figure.std) == pytest.approx((3, 49.0, 7**0.5))
    assert _row(found, "FedCG")[1:4] == ("47.52 ± 0.68", "49.00 ± 2.65 (3)", "+1.48 !")


def test_more_than_two_of_the_papers_deviations_is_flagged_less_is_not_and_without_a_deviation_nothing_is() -> None:
    assert is_far(Figure(48.9, None, 1), Published(47.52, 0.68))
    assert not is_far(Figure(48.8, None, 1), Published(47.52, 0.68))
    assert not is_far(Figure(90.0, None, 3), Published(10.0))


def test_the_searched_value_with_the_best_validation_is_shown_not_the_one_with_the_best_test() -> None:
    found = _only(
        record("fedprox", 0, 0.55, variant="mu=0.01", params={"mu": 0.01}, validation=[0.50, 0.40]),
        record("fedprox", 0, 0.60, variant="mu=1", params={"mu": 1.0}, validation=[0.45, 0.49]),
    )
    line = _line(found, "fedprox")
    assert (line.choice, line.tried, line.offered) == ("mu=0.01", 2, 4)
    assert line.figures["personal"].mean == pytest.approx(55.0)


def test_fedmd_cg_is_read_at_the_last_round() -> None:
    run = _fedmd_cg(0.57, last=0.54, whole=0.56, validation=[0.9, None, 0.5])
    line = _line(_only(run), "fedmd_cg")
    assert {name: figure.mean for name, figure in line.figures.items()} == pytest.approx(
        {"local": 54.0, "global": 56.0}
    )
    assert RunRecord.model_validate(run).validation(last=True) == pytest.approx(50.0)
    assert RunRecord.model_validate(run).validation(last=False) == pytest.approx(90.0)


def test_a_reduced_budget_is_a_table_of_its_own_marked_and_without_flags() -> None:
    reduced = {"rounds": [100, 6]}
    full, small = compare(
        _runs(record("fedcg", 0, 0.6), record("fedcg", 0, 0.6, paper=f"{CIFAR}@relu6x10", reduced=reduced))
    )
    assert (full.reduced, small.reduced) == ({}, {"rounds": (100, 6)})
    sheet = comparison_sheet(small)
    assert "REDUCED: rounds 6 (published 100)" in sheet.title
    assert _row(small, "FedCG")[3] == "+12.48"
    assert "published settings" in comparison_sheet(full).title


def test_clients_below_local_only_are_counted_over_all_seeds_and_gains_are_per_client() -> None:
    # Clients are at 0.49 and 0.51, then 0.59 and 0.61; local-only 0.50 and 0.60: client 1 loses twice by a point.
    found = _only(record("fedcg", 0, 0.50, local=0.50), record("fedcg", 1, 0.60, local=0.60))
    line = _line(found, "fedcg")
    assert (line.losing, line.compared) == (2, 4)
    assert line.gains == {"client-1": pytest.approx(-1.0), "client-2": pytest.approx(1.0)}
    assert ("FedCG", "-1.0", "+1.0") in gains_sheet(found).rows


def test_without_a_run_of_local_its_row_shows_the_shadows() -> None:
    found = _only(record("fedcg", 0, 0.5, local=0.40), record("fedavg", 1, 0.5, local=0.42))
    line = _line(found, "local")
    assert line.from_shadow
    assert line.by_seed["personal"] == {0: pytest.approx(40.0), 1: pytest.approx(42.0)}
    assert not _line(_only(record("local", 0, 0.41), record("fedcg", 0, 0.5, local=0.40)), "local").from_shadow


def test_rounds_that_were_undone_or_not_merged_are_remarked_over_all_seeds() -> None:
    broken = {**record("fedcg", 0, 0.4), "server_failures": [{"round": 1, "reason": "loss nan"}] * 2}
    broken["clients"][0]["failures"] = [{"round": 3, "reason": "loss nan"}]
    found = _only(broken, {**record("fedcg", 1, 0.4), "server_failures": [{"round": 4, "reason": "loss nan"}]})
    assert _row(found, "FedCG")[-1] == "1 local rounds diverged; 3 rounds without a merge"
    assert _row(_only(record("fedcg", 0, 0.4)), "FedCG")[-1] == ""


def test_a_run_that_fits_no_row_is_named() -> None:
    found = _only(record("fedcg", 0, 0.5, variant="mine"))
    assert found.strangers == ("0.json",)
    assert "0.json matches no row of this table" in comparison_sheet(found).notes


def test_an_order_is_confirmed_or_refuted_by_the_interval_of_the_paired_differences() -> None:
    # Differences 1, 2, 3: mean 2, deviation 1, t(2) = 4.303: half width 4.303 / sqrt(3) = 2.484, so 0 lies inside.
    wide = judge({0: 40.0, 1: 50.0, 2: 60.0}, {0: 41.0, 1: 52.0, 2: 63.0})
    assert wide.judgement is Judgement.UNDECIDED
    assert wide.difference == pytest.approx(2.0)
    assert wide.half_width == pytest.approx(2.4843, abs=1e-3)
    # Differences 2, 2.5, 3: deviation 0.5, half width 1.242: 0 lies below, although the seeds themselves differ by 20 points.
    lower, higher = {0: 40.0, 1: 50.0, 2: 60.0}, {0: 42.0, 1: 52.5, 2: 63.0}
    assert judge(lower, higher).judgement is Judgement.CONFIRMED
    assert judge(higher, lower).judgement is Judgement.REFUTED


def test_about_equal_is_judged_against_its_margin_and_two_common_seeds_decide_nothing() -> None:
    flat = {0: 40.0, 1: 50.0, 2: 60.0}
    assert judge(flat, {0: 40.1, 1: 50.2, 2: 60.3}, margin=1.0).judgement is Judgement.CONFIRMED
    assert judge(flat, {0: 45.0, 1: 55.1, 2: 65.2}, margin=1.0).judgement is Judgement.REFUTED
    assert judge(flat, {0: 41.0, 1: 51.1, 2: 60.9}, margin=1.0).judgement is Judgement.UNDECIDED
    assert judge({0: 1.0, 1: 1.0, 7: 3.0}, {0: 9.0, 1: 9.0, 8: 3.0}).judgement is Judgement.UNDECIDED
    assert judge({0: 1.0}, {1: 2.0}).difference is None


def test_accuracy_after_the_download_and_local_only_of_the_same_seeds_stand_beside_each_row() -> None:
    alone = [record("local", seed, share) for seed, share in ((0, 0.40), (1, 0.42), (2, 0.50))]
    shared = [record("fedavg", seed, 0.45, after=share) for seed, share in ((0, 0.50), (1, 0.52))]
    found = _only(*alone, *shared)
    # Seed 2 has no run of fedavg: 40 and 42 are left, mean 41, deviation sqrt(2). Nothing comes down to `local`.
    assert _row(found, "FedAvg")[4:6] == ("51.00 ± 1.41 (2)", "41.00 ± 1.41 (2)")
    assert _row(found, "Local")[4:6] == ("-", "44.00 ± 5.29 (3)")
    assert _row(found, "FedCG")[4:6] == ("-", "-")


def test_a_claim_may_compare_a_row_with_a_level_such_as_chance() -> None:
    one: dict[str, Any] = {"paper": "ppidsg:table7:cifar10", "variant": "adversarial"}
    runs = [record("ppidsg", seed, 0.5, after=0.10 + seed / 1000, **one) for seed in range(3)]
    (order,) = [order for order in _only(*runs).orders if order.measure == "after"]
    # 10, 10.1 and 10.2 %: 0 to 0.2 points above chance, within the margin of 2.
    assert order.verdict.judgement is Judgement.CONFIRMED
    assert order.verdict.difference == pytest.approx(-0.1)
    assert orders_sheet([_only(*runs)]).rows[0][2:5] == ("eq. 7 alone ≈ 10", "after download", "+0.00")


def test_the_command_prints_everything_without_torch_and_names_what_it_could_not_use(tmp_path: Path) -> None:
    write(tmp_path, *(record("fedcg", seed, 0.5, local=0.4) for seed in range(3)), {"format": 1})
    (tmp_path / "torn.json").write_text("{")
    program = "import sys; sys.modules['torch'] = None; sys.argv = ['fedcg', *sys.argv[1:]]; from fedcg.cli import main; main()"
    command = [sys.executable, "-c", program, "tables", "--runs", str(tmp_path), "--paper", CIFAR, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    content = data_of(done.stdout)
    (table,) = content["tables"]
    assert table["preset"]["name"] == CIFAR
    assert {order["verdict"]["judgement"] for order in table["orders"]} == set()
    assert (content["runs"], content["damaged"][0]["file"]) == (3, "torn.json")
    shown = run_fedcg("tables", "--runs", tmp_path)
    assert shown.exit_code == 0, shown.stderr
    assert "| FedCG | 47.52 ± 0.68 | 50.00 ± 0.00 (3) | +2.48 ! |" in _cells(shown.stdout)
    assert "3 simulated runs" in shown.stderr
    assert "Damaged: torn.json" in shown.stderr


def test_an_unknown_table_or_folder_is_named(tmp_path: Path) -> None:
    for arguments in (("--runs", tmp_path / "none"), ("--runs", tmp_path, "--paper", "fedcg:table7")):
        done = run_fedcg("tables", *arguments)
        assert (done.exit_code, done.stdout) == (7, "")
        assert done.stderr.startswith("Error: ")


def test_a_run_of_local_says_which_clients_of_the_same_seed_are_better_off_alone() -> None:
    alone = [record("local", seed, 0.40) for seed in (0, 1)]  # clients at 0.39 and 0.41
    shared = [record("fedsplit", 0, 0.395), record("fedsplit", 1, 0.42), record("fedsplit", 2, 0.30)]
    line = _line(_only(*alone, *shared), "fedsplit")
    assert (line.losing, line.compared) == (2, 4)  # seed 0: 0.385 < 0.39 and 0.405 < 0.41; seed 2 has no run of local
    assert line.gains == pytest.approx({"client-1": 0.75, "client-2": 0.75})


def test_the_last_download_is_that_of_the_last_round_not_of_the_best() -> None:
    run = record("fedseal", 9, 0.3, paper="sealed:alike:cifar10-4x500", last=0.2, after=0.4)
    for client, ended in zip(run["clients"], (0.5, 0.6), strict=True):
        client["curve"]["after"] = [0.4, ended]
    line = next(one for one in _only(run).lines if one.row.key == "fedseal")
    assert [round(line.figures[one].mean) for one in ("download", "personal", "last")] == [55, 30, 20]
