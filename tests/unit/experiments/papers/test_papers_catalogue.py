"""The published tables: figures, settings, names, and the runs they need."""

from __future__ import annotations

import pytest

from experiments.errors import OptionError
from experiments.papers.catalogue import claims, find_presets, presets
from experiments.papers.plan import TableRun, plan_runs, printed_runs, table_batch
from fedcg.learning.registry import get_method, method_names


def _published() -> list[TableRun]:
    return printed_runs(preset for preset in presets().values() if preset.stand_in is None)


def test_every_column_of_both_papers_has_all_its_rows_and_figures() -> None:
    sizes = {"fedcg:table1": 7, "fedmd_cg:table1": 7, "fedmd_cg:table3": 7, "fedmd_cg:table4": 15, "fedmd_cg:table5": 3}
    published = [preset for preset in presets().values() if preset.stand_in is None]
    assert len(published) == 6 + 9 + 9 + 3 + 9
    for preset in published:
        rows = sizes[preset.name.rpartition(":")[0]] - (preset.name == "fedcg:table1:office")  # FedDF was not measured
        printed = [row for row in preset.rows.values() if row.figures]
        assert len(printed) == rows, preset.name
        assert all(set(row.figures) == set(preset.measures) for row in printed)


def test_a_row_that_we_added_to_a_table_has_no_figure_and_is_none_of_the_papers_runs() -> None:
    added = presets()["fedcg:table1:cifar10-4"].rows["fedmd_cg"]
    assert not added.figures
    assert ("fedcg:table1:cifar10-4", "fedmd_cg") not in {(run.paper, run.method) for run in _published()}


def test_every_claim_names_rows_of_its_table() -> None:
    assert {claim.text for claim in claims()} >= {"Local < FedSplit < FedCG", "FedMD-CG > FedCG on CIFAR-10"}
    for claim in claims():
        assert {claim.lower, claim.higher} <= set(presets()[claim.preset].rows), claim


def test_a_group_means_all_its_tables_and_no_stand_in() -> None:
    assert [preset.name for preset in find_presets("fedmd_cg:table1:cifar10")] == [
        f"fedmd_cg:table1:cifar10-{omega}" for omega in ("w10", "w1", "w0.1")
    ]
    assert all(preset.stand_in is None for preset in find_presets("fedcg:table1"))
    assert len(find_presets("fedcg:table1")) == 6


@pytest.mark.parametrize("name", ["fedcg:table1:cifar", "fedcg:table9", "", "fedcg:table1:cifar10-4@never"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(OptionError, match="there are"):
        find_presets(name)


def test_a_published_table_is_planned_exactly_as_published() -> None:
    runs = [run.planned() for run in plan_runs("fedcg:table1:cifar10-4")]
    assert {run.setting.seed for run in runs} == {0, 1, 2, 3, 4}
    assert all(run.reduced == {} and run.setting.paper == "fedcg:table1:cifar10-4" for run in runs)
    of = {(run.setting.method, run.setting.variant): run.setting for run in runs}
    assert {variant for method, variant in of if method == "fedprox"} == {"mu=0.001", "mu=0.01", "mu=0.1", "mu=1"}
    assert {variant: setting.params["mu"] for (_, variant), setting in of.items() if variant}["mu=0.1"] == 0.1
    fedcg = of["fedcg", ""]
    assert (fedcg.rounds, fedcg.local_epochs, fedcg.batch_size, fedcg.lr) == (100, 20, 16, 3e-4)
    assert (fedcg.normalise, fedcg.flip, fedcg.validation, fedcg.quick) == ("imagenet", True, "test-half", False)
    assert (fedcg.params["server_iterations"], fedcg.params["server_batch"]) == (2000, 16)
    assert (of["feddf", ""].public_images, fedcg.public_images) == (32000, 0)


def test_fedmd_cg_searches_its_learning_rate() -> None:
    runs = [run.planned().setting for run in plan_runs("fedmd_cg:table1:cifar10-w10", methods=["fedmd_cg"], seeds=[3])]
    assert [(run.variant, run.lr) for run in runs] == [("lr=0.01", 0.01), ("lr=0.05", 0.05), ("lr=0.08", 0.08)]
    assert {(run.rounds, run.local_steps, run.params["diversity"]) for run in runs} == {(250, 20, "published_2")}
    (chosen,) = plan_runs("fedmd_cg:table1:cifar10-w10", methods=["fedmd_cg"], seeds=[3], setting={"lr": 0.05})
    assert (chosen.variant, chosen.planned().reduced) == ("lr=0.05", {})


def test_a_value_outside_the_published_search_is_a_difference() -> None:
    (run,) = plan_runs("fedcg:table1:cifar10-4", methods=["fedprox"], seeds=[0], params={"fedprox": {"mu": 0.5}})
    assert run.planned().reduced == {"params.mu": (0.001, 0.5)}
    assert run.variant == "mu=0.5"


def test_a_reduced_budget_lists_what_differs() -> None:
    (run,) = plan_runs("fedcg:table1:cifar10-8@relu6x10", methods=["fedavg"], seeds=[0])
    assert run.paper == "fedcg:table1:cifar10-8@relu6x10"
    reduced = run.planned().reduced
    assert (reduced["network"], reduced["rounds"]) == (("lenet5", "lenet5_relu"), (100, 6))
    assert (reduced["params.epochs"], reduced["generator"]) == ((20, 10), ("conv", "mlp"))
    assert set(reduced) == {"network", "rounds", "params.epochs", "generator", "discriminator", "noise_dim"}


def test_the_authors_code_is_a_budget_that_goes_with_a_shorter_one_and_leaves_a_rows_own_values_alone() -> None:
    runs = plan_runs("fedmd_cg:table4:cifar10-w10@code+r50", seeds=[0], setting={"lr": 0.05})
    whole, no_mse = (
        next(run for run in runs if run.variant == variant).planned() for variant in ("lr=0.05", "model-no-mse-lr=0.05")
    )
    assert set(whole.reduced) == {
        "network",
        "rounds",
        *(f"params.{name}" for name in ("divergence", "temperature", "ramp_power", "lambda2", "diversity")),
    }
    assert whole.setting.params["lambda2"] == 0.1
    assert (no_mse.setting.params["lambda2"], no_mse.setting.params["temperature"]) == (0.0, 10.0)
    (average,) = plan_runs("fedmd_cg:table1:cifar10-w10@code", methods=["fedavg"], seeds=[0], setting={"lr": 0.05})
    assert set(average.planned().reduced) == {"network"}
    with pytest.raises(OptionError, match="no budget 'nonsense'"):
        plan_runs("fedmd_cg:table1:cifar10-w10@code+nonsense")


def test_what_the_user_types_overrides_and_is_listed() -> None:
    (run,) = table_batch(
        "fedcg:table1:cifar10-4",
        {"rounds": 12, "data": "/images/cifar10", "device": "cuda", "clients": 77},
        frozenset({"rounds", "data", "device"}),
        ["fedcg"],
        [0],
        {"": {"lr": 0.001}, "fedcg": {"server_iterations": 200}},
    ).runs
    assert run.reduced == {
        "rounds": (100, 12),
        "params.lr": (3e-4, 0.001),
        "params.server_iterations": (2000, 200),
    }
    assert (run.setting.rounds, run.setting.lr, run.setting.device) == (12, 0.001, "cuda")
    assert (run.setting.clients, run.setting.data) == (4, "/images/cifar10")
    assert run.setting.all_params()["lr"] == 0.001
    assert run.setting.params["server_iterations"] == 200


def test_another_named_data_set_is_a_difference_and_a_folder_of_the_same_images_is_none() -> None:
    (digits,) = plan_runs("fedcg:table1:cifar10-4", methods=["local"], seeds=[0], setting={"data": "digits"})
    assert digits.planned().reduced == {"data": ("torchvision:CIFAR10", "digits")}
    (folder,) = plan_runs("fedcg:table1:cifar10-4", methods=["local"], seeds=[0], setting={"data": "/images/cifar10"})
    assert folder.planned().reduced == {}


def test_data_that_nobody_can_download_has_to_be_brought() -> None:
    with pytest.raises(OptionError, match="mnist_m, svhn, syn, usps"):
        plan_runs("fedcg:table1:digit5")
    (run,) = plan_runs("fedcg:table1:digit5", methods=["local"], seeds=[0], setting={"data": "/images/digit5"})
    assert run.planned().reduced == {}


def test_a_row_that_no_table_has_is_refused() -> None:
    with pytest.raises(OptionError, match="no row 'fedopt'"):
        plan_runs("fedcg:table1:cifar10-4", methods=["fedopt"])


def test_one_run_serves_every_table_that_shows_it() -> None:
    whole, *others = (
        plan_runs(f"fedmd_cg:table{table}:cifar10-w10", methods=[row], seeds=[0], setting={"lr": 0.05})
        for table, row in ((1, "fedmd_cg"), (3, "fedmd_cg/kdc"), (4, "fedmd_cg"), (5, "fedmd_cg/div2"))
    )
    full = [run for run in others[1] if run.variant == "lr=0.05"]
    assert list(whole) == list(others[0]) == full == list(others[2])


def test_a_variant_can_be_asked_for_by_itself() -> None:
    (run,) = plan_runs("fedmd_cg:table4:cifar10-w10", methods=["fedmd_cg/model-no-kl"], seeds=[0], setting={"lr": 0.05})
    assert (run.variant, run.params["lambda3"]) == ("model-no-kl-lr=0.05", 0.0)


def _accepted(run: TableRun) -> None:
    setting = run.planned().setting
    setting.checked_partition()
    get_method(run.method).params_type.model_validate(setting.all_params())


def test_every_planned_run_is_accepted_by_the_setting_and_by_its_method() -> None:
    seen = {(run.paper, run.method, run.variant): run for run in _published()}
    assert len(seen) * 5 == len(_published())
    assert {run.method for run in seen.values()} <= set(method_names())
    for run in seen.values():
        _accepted(run)
