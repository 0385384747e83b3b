"""A program of the user's own, from `fedcg new` to four agents over Mosquitto: trained, sent without its extractor, exported; and asked for again when its code changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedcg.learning.program import Program
from tests.support.commands import data_of, run_fedcg
from tests.support.program_stack import ProgramStack

PARAMS = {"epochs": 2, "lr": 1e-3, "server_iterations": 20}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProgramStack]:
    root = tmp_path_factory.mktemp("programs")
    made = run_fedcg("new", str(root / "shapes"))
    assert made.exit_code == 0, made.output
    one = ProgramStack(root / "stack", project=root / "shapes", params=PARAMS)
    with one.up(agents=True):
        one.wait_finished()
        yield one


def test_the_same_file_trains_on_four_agents_and_each_learns_something(stack: ProgramStack) -> None:
    ends = {device: next(e for e in stack.events(device) if e["event"] == "finalised") for device in stack.devices}
    assert all(end["accuracy_personal"] > 0.6 for end in ends.values()), ends


def test_an_update_names_the_digest_of_the_code_and_holds_no_extractor(stack: ProgramStack) -> None:
    device = stack.devices[0]
    digest = Program("client:client", stack.config(device).parent).digest()
    sent = data_of(stack.command("agent", "sent", "--config", str(stack.config(device)), "--json"))
    assert digest in str(sent)
    assert "extractor" not in str(sent)
