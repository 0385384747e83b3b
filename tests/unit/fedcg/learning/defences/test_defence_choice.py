"""Which defences there are, their parameters, and what they can't be combined with."""

import subprocess
import sys

import pytest

from fedcg.learning.defences.defence import check_defence, defence_label, defence_names, defence_of


def test_defences_are_the_files_that_assign_one() -> None:
    assert {"antigan", "ats"} <= set(defence_names())
    assert {"defence", "params", "gan_mixing", "sample_pictures"}.isdisjoint(defence_names())
    for name in defence_names():
        assert defence_of(name, {})[0].name == name


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("antigam", {}, "there is no 'antigam'.*did you mean `antigan`"),
        ("antigan", {"ve": 1}, "ve: there is no such setting.*did you mean `v_e`"),
        ("antigan", {"mu": 1.1, "v_e": -1}, "v_e: .*greater than or equal to 0.*; mu: .*less than or equal to 1"),
        (None, {"v_e": 1}, "defence_params need a defence: antigan, ats, etc"),
    ],
)
def test_a_bad_choice_is_named_with_what_there_is(name: str | None, values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_defence(name, values, dp_sgd=False)


def test_a_defence_that_learns_from_all_images_is_refused_beside_dp_sgd() -> None:
    with pytest.raises(ValueError, match="antigan learns from all real images, which dp_sgd's epsilon does not cover"):
        check_defence("antigan", {}, dp_sgd=True)
    check_defence("ats", {}, dp_sgd=True)


def test_a_label_has_what_differs_from_the_defaults() -> None:
    assert defence_label(None, {}) == ""
    assert defence_label("antigan", {"v_e": 0.5}) == "antigan"
    assert defence_label("antigan", {"v_e": 0.3, "mu": 0.7}) == "antigan-v_e=0.3-mu=0.7"


def test_the_choice_is_checked_without_torch() -> None:
    code = (
        "import sys; from fedcg.learning.defences.defence import *; "
        "[check_defence(name, {}, dp_sgd=False) for name in defence_names()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
