"""The published tables: figures, settings, names, and the runs they need."""

from typing import Any

import pytest
from pydantic import JsonValue

from experiments.errors import OptionError
from experiments.papers.catalogue import claims, find_presets, presets
from experiments.papers.plan import plan_runs
from experiments.settings import check
from experiments.simulation.batch import PlannedRun
from fedcg.learning.mechanisms.dp_sgd import Spent, private_step_count, sampling_rate
from fedcg.learning.method import TrainingParams
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method, method_names
from tests.support.present import present

CIFAR = "fedcg:table1:cifar10-4"


def planned(paper: str, row: str, **typed: Any) -> PlannedRun:
    """The only run of seed 0 of a row of a table."""
    (run,) = plan_runs(paper, methods=[row], seeds=[0], **typed)
    return run


def test_every_claim_names_rows_of_its_table() -> None:
    assert {claim.text for claim in claims()} >= {"Local < FedSplit < FedCG", "FedMD-CG > FedCG on CIFAR-10"}
    for claim in claims():
        ends = {claim.lower, claim.higher} - {5.0, 10.0}  # levels in percent
        assert ends <= set(presets()[claim.preset].rows), claim


def test_a_group_means_all_its_tables_and_no_stand_in() -> None:
    assert [preset.name for preset in find_presets("fedmd_cg:table1:cifar10")] == [
        f"fedmd_cg:table1:cifar10-{omega}" for omega in ("w10", "w1", "w0.1")
    ]
    assert all(preset.stand_in is None for preset in find_presets("fedcg:table1"))
    assert len(find_presets("fedcg:table1")) == 6


@pytest.mark.parametrize("name", ["fedcg:table1:cifar", "fedcg:table9", "", "fedcg:table1:cifar10-4@never"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(OptionError, match="choose"):
        find_presets(name)


def test_a_published_table_is_planned_exactly_as_published() -> None:
    runs = plan_runs(CIFAR)
    assert {run.setting.seed for run in runs} == {0, 1, 2, 3, 4}
    assert all(run.reduced == {} and run.setting.paper == CIFAR for run in runs)
    of = {(run.setting.method, run.setting.variant): run.setting for run in runs}
    assert {variant for method, variant in of if method == "fedprox"} == {"mu=0.001", "mu=0.01", "mu=0.1", "mu=1"}
    assert {variant: setting.params["mu"] for (_, variant), setting in of.items() if variant}["mu=0.1"] == 0.1
    assert {method for method, _ in of} >= {"local", "fedavg", "fedprox", "feddf", "fedsplit", "fedgen", "fedcg"}
    fedcg = of["fedcg", ""]
    assert (fedcg.rounds, fedcg.local_epochs, fedcg.batch_size, fedcg.lr) == (100, 20, 16, 3e-4)
    assert (fedcg.normalise, fedcg.flip, fedcg.validation, fedcg.quick) == ("imagenet", True, "test-half", False)
    assert (fedcg.params["server_iterations"], fedcg.params["server_batch"]) == (2000, 16)
    assert (of["feddf", ""].public_images, fedcg.public_images) == (32000, 0)


def test_fedmd_cg_searches_its_learning_rate() -> None:
    runs = [run.setting for run in plan_runs("fedmd_cg:table1:cifar10-w10", methods=["fedmd_cg"], seeds=[3])]
    assert [(run.variant, run.lr) for run in runs] == [("lr=0.01", 0.01), ("lr=0.05", 0.05), ("lr=0.08", 0.08)]
    assert {(run.rounds, run.local_steps, run.params["diversity"]) for run in runs} == {(250, 20, "published_2")}
    (chosen,) = plan_runs("fedmd_cg:table1:cifar10-w10", methods=["fedmd_cg"], seeds=[3], setting={"lr": 0.05})
    assert (chosen.setting.variant, chosen.reduced) == ("lr=0.05", {})


def test_a_value_outside_the_published_search_is_a_difference() -> None:
    run = planned(CIFAR, "fedprox", params={"fedprox": {"mu": 0.5}})
    assert (run.reduced, run.setting.variant) == ({"params.mu": (0.001, 0.5)}, "mu=0.5")


def test_the_authors_code_is_a_budget_that_goes_with_a_shorter_one_and_leaves_a_rows_own_values_alone() -> None:
    runs = plan_runs("fedmd_cg:table4:cifar10-w10@code+r50", seeds=[0], setting={"lr": 0.05})
    of = {run.setting.variant: run for run in runs}
    params = ("divergence", "temperature", "ramp_power", "lambda2", "diversity")
    whole, without = of["lr=0.05"], of["model-no-mse-lr=0.05"].setting.params
    assert set(whole.reduced) == {"network", "rounds", *(f"params.{name}" for name in params)}
    assert whole.setting.params["lambda2"] == 0.1
    assert (without["lambda2"], without["temperature"]) == (0.0, 10.0)
    assert set(planned("fedmd_cg:table1:cifar10-w10@code", "fedavg", setting={"lr": 0.05}).reduced) == {"network"}
    with pytest.raises(OptionError, match=r"no budget 'code\+nonsense'"):
        plan_runs("fedmd_cg:table1:cifar10-w10@code+nonsense")


def test_what_the_user_types_overrides_and_is_listed() -> None:
    run = planned(
        CIFAR,
        "fedcg",
        setting={"rounds": 12, "data": "/images/cifar10", "device": "cuda", "privacy": {"gradient_noise": 0.1}},
        params={"": {"lr": 0.001}, "fedcg": {"server_iterations": 200}},
    )
    assert run.reduced == {
        "rounds": (100, 12),
        "params.lr": (3e-4, 0.001),
        "params.server_iterations": (2000, 200),
        "privacy": ("", "gradient_noise=0.1"),
    }
    assert run.setting.privacy == PrivacySettings(gradient_noise=0.1)
    assert (run.setting.rounds, run.setting.lr, run.setting.device) == (12, 0.001, "cuda")
    assert (run.setting.clients, run.setting.data) == (4, "/images/cifar10")
    assert (run.setting.all_params()["lr"], run.setting.params["server_iterations"]) == (0.001, 200)


def test_another_named_data_set_is_a_difference_and_a_folder_of_the_same_images_is_none() -> None:
    digits, folder = (planned(CIFAR, "local", setting={"data": data}) for data in ("digits", "/images/cifar10"))
    assert (digits.reduced, folder.reduced) == ({"data": ("torchvision:CIFAR10", "digits")}, {})


def test_data_that_nobody_can_download_has_to_be_brought() -> None:
    with pytest.raises(OptionError, match="mnist_m, svhn, syn, usps"):
        plan_runs("fedcg:table1:digit5")
    assert planned("fedcg:table1:digit5", "local", setting={"data": "/images/digit5"}).reduced == {}


def test_ppidsgs_rows_have_networks_mechanisms_and_steps_of_their_own() -> None:
    rows = ("fedavg/ats", "fedavg/dp-5-10", "fedavg/gc-40", "fedcg", "ppidsg")
    runs = plan_runs("ppidsg:table4:mnist", methods=rows, seeds=[0])
    assert all(run.reduced == {} for run in runs)
    settings = [run.setting for run in runs]
    assert [
        (setting.network, setting.defence_label or setting.privacy.label, setting.all_params().get("lr"))
        for setting in settings
    ] == [
        ("resnet18+project:512", "ats", 0.01),
        ("lenet5_relu", "update_noise=0.00186", 0.01),  # 2 · 0.01 · 10 / 6000 · sqrt(2 ln(1.25 · 50 / 1e-5)) · 50 / 5
        ("lenet5_relu", "prune=0.4", 0.01),
        ("lenet5", "", 3e-4),
        ("image_paper", "", 0.01),
    ]
    assert planned("ppidsg:table8:cifar10", "ppidsg/ir-ia").setting.params["scrambling"] == "IR,IA,IS"
    (whole,) = plan_runs("ppidsg:table8:cifar10", methods=["ppidsg/"], seeds=[0])
    assert (whole.setting.paper, whole.setting.variant) == ("ppidsg:table4:cifar10", "")
    assert len(plan_runs("ppidsg:table8:cifar10", methods=["ppidsg"], seeds=[0])) == 13


def test_a_budget_may_set_one_rows_networks_and_a_users_networks_of_one_method_are_over_both() -> None:
    name, rows = "ppidsg:table4:digits@small", ["fedavg/", "ppidsg/"]
    plain = plan_runs(name, methods=rows, seeds=[0])
    assert {run.setting.network for run in plain} == {"image_small"}
    assert [run.reduced["network"] for run in plain] == [("lenet5_relu", "image_small"), ("image_paper", "image_small")]
    runs = plan_runs(name, methods=rows, seeds=[0], setting={"generator": "conv"})
    assert {run.setting.generator for run in runs} == {"conv"}


@pytest.mark.parametrize(
    "name", ["ppidsg:table4:digits@small", "ppidsg:table4:digits@code", "ppidsg:fig5:digits@small"]
)
def test_every_row_of_a_reduced_budget_can_be_run(name: str) -> None:
    for run in plan_runs(name, seeds=[0]):
        check(run.setting)


def test_what_is_typed_is_over_what_a_budget_sets_for_a_method_or_a_row() -> None:
    run = planned("ppidsg:table4:digits@small", "fedavg/", setting={"lr": 0.02})
    assert run.setting.all_params()["lr"] == 0.02
    typed: dict[str, JsonValue] = {"defence_params": {"v_e": 0.3}}
    rows = ["fedavg/", "fedavg/antigan"]
    runs = plan_runs("antigan:table1:digits-2@digits", methods=rows, seeds=[0], setting=typed)
    plain, mixed = (run.setting for run in runs)
    assert (plain.defence, plain.defence_params) == (None, {})
    assert mixed.defence_params == {"gan_steps": 400, "obfuscation_steps": 200, "batch_size": 25, "v_e": 0.3}


def test_a_budget_is_only_for_the_scenarios_that_it_names_and_a_row_must_be_one_of_the_table() -> None:
    with pytest.raises(OptionError, match="no row 'fedopt'"):
        plan_runs(CIFAR, methods=["fedopt"])
    assert find_presets("antigan:table1:digits-2@digits")
    with pytest.raises(OptionError, match="'small' does not apply to antigan:table1:digits-2, only to mnist-2"):
        find_presets("antigan:table1:digits-2@small")


DP_SGD = "mnist-2 cifar10-iid4@small cifar10-2@small digits-2 digits-iid4 digits-2@digits digits-iid4@digits"


@pytest.mark.parametrize("name", DP_SGD.split())
def test_the_noise_of_dp_sgd_reaches_the_rows_epsilon_in_every_budget(name: str) -> None:
    for wanted in (0.5, 1.0, 2.0, 4.0, 8.0):
        setting = planned(f"antigan:table1:{name}", f"fedavg/dp-{wanted:g}").setting
        images, dp_sgd = present(setting.images_per_client), present(setting.privacy.dp_sgd)
        params = TrainingParams.model_validate(setting.all_params())
        steps = private_step_count(params, images) * setting.rounds
        spent = Spent().with_round(dp_sgd, sampling_rate(images, params.batch_size), steps)
        assert 0.97 * wanted < spent.epsilon(dp_sgd.delta) <= wanted


def test_one_run_serves_every_table_that_shows_it() -> None:
    whole, *others = (
        plan_runs(f"fedmd_cg:table{table}:cifar10-w10", methods=[row], seeds=[0], setting={"lr": 0.05})
        for table, row in ((1, "fedmd_cg"), (3, "fedmd_cg/kdc"), (4, "fedmd_cg"), (5, "fedmd_cg/div2"))
    )
    full = [run for run in others[1] if run.setting.variant == "lr=0.05"]
    assert list(whole) == list(others[0]) == full == list(others[2])


def test_every_planned_run_is_accepted_by_the_setting_and_by_its_method() -> None:
    runs: dict[str, PlannedRun] = {}  # every run that published figures need, each once
    for preset in presets().values():
        rows = [row.key for row in preset.rows.values() if row.needs is None and row.figures]
        brought: dict[str, JsonValue] | None = {"data": "brought"} if preset.needs else None
        if preset.stand_in is None and rows:
            runs |= {run.setting.name: run for run in plan_runs(preset.name, methods=rows, setting=brought)}
    settings = (run.setting for run in runs.values())
    seen = {(one.paper or "", one.method, one.variant): one for one in settings}
    assert sum(len(presets()[paper].seeds) for paper, _, _ in seen) == len(runs)
    assert {method for _, method, _ in seen} <= set(method_names())
    for setting in seen.values():
        setting.deal()
        get_method(setting.method).params_type.model_validate(setting.all_params())
