"""`--network` of the commands that run a whole experiment on one machine."""

from __future__ import annotations

import os

import pytest

from experiments.settings.cli_options import check
from experiments.settings.options import Setting
from fedcg.learning.split_names import ALLOW_VARIABLE


def test_a_function_that_a_person_typed_may_be_imported_by_the_processes_of_the_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "")
    check(Setting(network="our_networks:small_residual"))
    assert os.environ[ALLOW_VARIABLE] == "our_networks:small_residual"
