"""A program of the user's own, from `fedcg new` to four agents over Mosquitto: trained, sent without its private part, exported and answered; and asked for again when its code changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.store.owner_record import Consent
from export.model.runtime import Model
from fedcg.learning.program import Program
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.toml_edit import set_values
from tests.support.program_stack import ProgramStack
from tests.support.stack import wait_for

CASES = {
    "images": ("fedcg", {"epochs": 2, "lr": 1e-3, "server_iterations": 20}),
    "trainer": ("fedsplit", {"epochs": 10, "lr": 3e-3}),
    "tables": ("fedcg", {"epochs": 5, "lr": 1e-3, "server_iterations": 20}),
    "signals": ("fedcg", {"epochs": 2, "lr": 1e-3, "server_iterations": 20}),
}
SLOW = {"tables", "signals"}


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in CASES]
)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProgramStack]:
    root, (method, params) = tmp_path_factory.mktemp("programs"), CASES[request.param]
    made = run_fedcg("new", str(root / "shapes"), "--template", request.param)
    assert made.exit_code == 0, made.output
    one = ProgramStack(root / "stack", project=root / "shapes", params=params, method=method)
    one.prepare()
    audit: dict[tuple[str, str], Any] = {("audit", "before_publish"): "quick", ("audit", "attacks"): ["labels"]}
    set_values(one.config(one.devices[3]), audit)
    with one.up(agents=True):
        one.wait_finished()
        yield one


def test_the_same_file_trains_on_four_agents_and_each_model_answers(stack: ProgramStack) -> None:
    for device in stack.devices:
        end = next(event for event in stack.events(device) if event["event"] == "finalised")
        assert end["accuracy_personal"] > 0.05, end
        model = Model.load(Path(end["model_dir"]))
        form = model.manifest.input
        answers = model.predict(np.zeros((3, *form.shape), form.dtype))
        assert answers.shape == (3, len(model.manifest.classes) or 1)
        assert np.isfinite(answers).all()
        listed = data_of(stack.command("model", "list", str(Path(end["model_dir"]).parent), "--json"))
        assert listed[-1]["accuracy"] > 0.05


def test_an_update_names_the_digest_of_the_code_and_holds_no_private_tensor(stack: ProgramStack) -> None:
    device = stack.devices[0]
    digest = Program("client:client", stack.config(device).parent).digest()
    sent = str(data_of(stack.command("agent", "sent", "--config", str(stack.config(device)), "--json")))
    assert digest in sent
    assert "extractor" not in sent


def test_what_a_program_sends_is_audited_before_it_leaves_and_afterwards(stack: ProgramStack, tmp_path: Path) -> None:
    device = stack.devices[3]
    config, is_trainer = stack.config(device), stack.method == "fedsplit"
    judged = [event for event in stack.events(device) if event["event"] == "audited"]
    assert [event["passed"] for event in judged] == [True, True]
    (about,) = json.loads((stack.store(device) / "audit" / "report.json").read_text())["attacks"]
    assert (about["skipped"] is None) != is_trainer
    words = ["--updates", str(stack.home), "--client", device, "--data", str(config.parent / "program:client:client")]
    words += ["--private", str(stack.store(device)), "--effort", "quick", "--attacks", "labels,inversion"]
    done = run_fedcg("audit", "run", *words, "--out", str(tmp_path / "report"), "--json")
    if is_trainer:
        assert "not the program of a fedcg.Trainer" in done.output
        return
    assert done.exit_code == 0, done.output
    tried = {one["name"]: one["skipped"] is None for one in data_of(done.stdout)["attacks"]}
    assert tried == {"labels": True, "inversion": 'dtype = "uint8"' in stack.plan()}  # pixels


def test_changed_code_does_not_run_before_its_owner_approved_it(stack: ProgramStack) -> None:
    device = stack.devices[1]
    code = stack.config(device).parent / "client.py"
    before = Program("client:client", code.parent).digest()
    for one in stack.devices:
        stack.start(one, "agent", "run", "--config", str(stack.config(one)))
    wait_for(lambda: sum(event["event"] == "welcomed" for event in stack.events(device)) == 2, "it runs again")
    code.write_text(code.read_text() + f"\nopen({str(code.parent / 'ran')!r}, 'w').close()\n")
    stack.command("federation", "extend", "--dir", str(stack.home), "--rounds", "1")
    event = stack.wait_event(device, lambda event: event["event"] == "approval_needed", "it asks its owner")
    assert before[:12] in event["detail"]
    stack.kill(device)
    stack.start(device, "agent", "run", "--config", str(stack.config(device)))
    wait_for(lambda: sum(event["event"] == "welcomed" for event in stack.events(device)) == 3, "it runs once more")
    assert stack.doctor(device)["data"]["state"] == "warning"
    assert not (code.parent / "ran").exists()
    approve = ["agent", "approve", event["spec"][:12], "--yes", "--config", str(stack.config(device))]
    wait_for(lambda: run_fedcg(*approve).exit_code == 0, "the agent takes the approval")
    stack.wait_event(device, lambda event: event["event"] == "committed" and event["round"] == 3, "it trains again")
    assert (code.parent / "ran").exists()
    allowed = Consent(stack.store(device)).read().programs[event["spec"]]
    assert allowed == Program("client:client", code.parent).digest() == sha256(code.read_bytes()).hexdigest() != before
    stack.command("agent", "approve", "--revoke", event["spec"], "--config", str(stack.config(device)))
    stack.command("federation", "extend", "--dir", str(stack.home), "--rounds", "1")
    taken = "may not run any more: its owner revoked the permission"
    stack.wait_event(device, lambda event: taken in str(event.get("detail")), "it does not run again")


def test_the_doctor_calls_the_program_and_names_what_is_wrong_with_it(stack: ProgramStack) -> None:
    device = stack.devices[2]
    assert re.search(
        r"client:client, sha256 \w{64}: (train \d+, test \d+|a trainer)$", stack.doctor(device)["data"]["detail"]
    )
    code = stack.config(device).parent / "client.py"
    text = code.read_text()
    (stack.store(device) / "consent.json").unlink()  # which keeps the doctor from running other code
    code.write_text(text.replace("nn.ReLU()", "nn.PReLU()"))
    assert re.search(r"differs from this program's: network.\w+ has ", stack.doctor(device)["data"]["detail"])
    code.write_text(f"{text}\nclient = None\n")
    assert "no function client" in stack.doctor(device)["data"]["detail"]
    set_values(stack.config(device), {("training", "program"): "nowhere:client"})
    finding = stack.doctor(device)["data"]
    assert finding["state"] == "failed"
    assert "no module nowhere in" in str(finding)
