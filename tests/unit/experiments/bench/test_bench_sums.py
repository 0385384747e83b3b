"""`fedcg bench sums`: what sums that nobody can look into cost, by the number of devices."""

from __future__ import annotations

from tests.support.commands import data_of, run_fedcg


def test_the_cost_of_a_masked_sum_grows_with_the_devices_and_its_numbers_stay_4_bytes() -> None:
    words = ("bench", "sums", "--devices", 8, "--devices", 16, "--lost", 0.25, "--numbers", 100, "--json")
    shown = run_fedcg(*words)
    assert shown.exit_code == 0, shown.output
    few, many = data_of(shown.stdout)["cases"]
    assert (few["devices"], few["lost"], many["devices"], many["lost"]) == (8, 2, 16, 4)
    assert few["numbers_bytes"] == many["numbers_bytes"] == 400
    assert few["control_up"] < many["control_up"]
    assert min(few["device_ms"], many["coordinator_ms"]) > 0.0


def test_devices_that_are_too_few_to_open_a_sum_end_it_with_a_sentence() -> None:
    shown = run_fedcg("bench", "sums", "--devices", 4, "--lost", 0.5)
    assert shown.exit_code != 0
    assert "2 devices are too few to open a sum: 4 are needed" in shown.output
