"""The operator's plan.toml: an example to start from, a table of every field, and errors in words, all at once."""

import re
from pathlib import Path

import pytest
import tomllib
from typer.testing import Result

from coordinator.errors import PlanError
from coordinator.operations import create_federation
from coordinator.operations.create_federation import check_plan, in_a_process, make_artifacts
from fedcg.learning.spec import FederationPlan, ImageForm
from tests.support.commands import run_fedcg

DOCUMENT = Path(__file__).parents[4] / "docs" / "plan.md"


def _run(*arguments: str) -> Result:
    return run_fedcg("federation", *arguments)


def test_the_document_has_a_row_for_every_field() -> None:
    schema = FederationPlan.model_json_schema()
    tables = {
        name: schema["$defs"][field["$ref"].rpartition("/")[2]]["properties"] if "$ref" in field else None
        for name, field in schema["properties"].items()
    }
    names = [f"{name}.{inner}" if fields else name for name, fields in tables.items() for inner in (fields or [name])]
    rows = [line.split("`")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(names)


def test_the_example_has_every_field_with_its_default_and_makes_a_federation(tmp_path: Path) -> None:
    example = _run("plan", "--example").stdout
    plan = tmp_path / "plan.toml"
    plan.write_text(re.sub(r"(?m)^# (\w+ = .*)$", r"\1", example))  # with what it only shows
    full, short = tomllib.loads(plan.read_text()), tomllib.loads(example)
    assert set(full) == {
        name for name, field in FederationPlan.model_fields.items() if field.is_required() or field.default is not None
    }
    tables = FederationPlan.model_json_schema()["$defs"]
    for table, name in (("ImageForm", "image"), ("NetworkChoice", "network")):
        fields = tables[table]["properties"].items()
        assert set(full[name]) == {field for field, about in fields if about.get("default", "") is not None}
    del full["params"], short["params"]
    assert FederationPlan.model_validate(full) == FederationPlan.model_validate(short)
    assert _run("plan", str(plan)).exit_code == 0
    home = tmp_path / "home"
    assert run_fedcg("coordinator", "init", "--dir", str(home)).exit_code == 0
    created = _run("create", str(plan), "--dir", str(home))
    assert created.exit_code == 0, created.output
    assert "Opened federation casting" in created.stdout


def test_a_process_of_its_own_makes_the_same_artifacts_and_tells_why_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = ImageForm(mode="L", height=28, width=28, mean=(0.5,), std=(0.5,))
    plan = FederationPlan(federation="tiny", classes=("x", "y"), method="fedsplit", rounds=1, image=form)
    here = make_artifacts(plan, tmp_path / "here")
    monkeypatch.setattr(create_federation, "in_a_process", in_a_process)
    assert make_artifacts(plan, tmp_path / "there") == here
    with pytest.raises(PlanError, match=r"can't be completed: 1 problem\n  params.nonsense: there is no such setting"):
        check_plan(plan.model_copy(update={"params": {"nonsense": 1}}))


def test_a_plan_that_takes_too_long_or_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    form = ImageForm(mode="RGB", height=1024, width=1024, mean=(0.5,) * 3, std=(0.5,) * 3)
    plan = FederationPlan(federation="large", classes=("x", "y"), method="fedcg", rounds=1, image=form)
    with pytest.raises(PlanError, match=r"its parts have \d{3},\d{3},\d{3} numbers.*smaller images"):
        check_plan(plan)
    monkeypatch.setattr(create_federation, "in_a_process", in_a_process)
    monkeypatch.setattr(create_federation, "COMPLETE_S", 0.05)
    with pytest.raises(PlanError, match=r"takes longer than 0\.05 s"):
        check_plan(plan)


@pytest.mark.parametrize("command", ["plan", "create"])
def test_everything_that_is_wrong_with_a_plan_is_reported_at_once_with_its_line(tmp_path: Path, command: str) -> None:
    home = tmp_path / "home"
    run_fedcg("coordinator", "init", "--dir", str(home))
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'federation = "Shapes One"\nclasses = ["a"]\nmethod = "fedgc"\nrounds = 0\nmin_client = 3\ncodec = "f8"\n'
        '[image]\nmode = "GRAY"\nheight = 2\nmean = [0.5]\nstd = [0]\n'
    )
    result = _run(command, str(plan), *(["--dir", str(home)] if command == "create" else []))
    assert result.exit_code == 2
    for line in (
        "line 1: federation: must be 1 to 63 small letters, digits and dashes",
        "line 2: classes: ",
        "line 3: method: there is no method 'fedgc'; there are ",
        "line 4: rounds: must be greater than or equal to 1",
        "line 5: min_client: there is no such setting (did you mean `min_clients`?)",
        "line 6: codec: must be 'f32', 'f16', 'i8', 'f16-delta' or 'i8-delta'",
        "line 8: image.mode: must be 'L' or 'RGB'",
        "line 9: image.height: must be greater than or equal to 4",
        "line 7: image.width: is missing",
        "line 11: image.std.0: must be greater than or equal to 0.0001",
        "plan.toml: 10 problems",
    ):
        assert line in result.stderr, result.stderr


@pytest.mark.parametrize("command", ["plan", "create"])
def test_what_method_and_networks_refuse_is_reported_beside_what_the_fields_refuse(
    tmp_path: Path, command: str
) -> None:
    home, plan = tmp_path / "home", tmp_path / "plan.toml"
    run_fedcg("coordinator", "init", "--dir", str(home))
    plan.write_text(
        'federation = "shapes"\nclasses = ["a", "b", "a"]\nmethod = "fedcg"\nrounds = 0\nmin_clients = 2\n'
        '[image]\nmode = "L"\nheight = 32\nwidth = 32\nmean = [0.5, 0.5]\nstd = [1e-300]\n'
        '[params]\nlr = 1e300\nepochs = 0\nephocs = 3\ngan_lr = [1]\n[network]\nnoise_dim = 0\ngenerator = "nope"\n'
    )
    result = _run(command, str(plan), *(["--dir", str(home)] if command == "create" else []))
    assert result.exit_code == 2
    for line in (
        "line 2: classes: 'a' is there 2 times; each class once",
        "line 4: rounds: must be greater than or equal to 1",
        "line 5: min_clients: min_clients = 2 is below min_cohort = 3",
        "line 10: image.mean: must have one number for each channel, 1 with mode L, not 2",
        "line 11: image.std.0: must be greater than or equal to 0.0001",
        "line 13: params.lr: must be true, false, a text of at most 200 characters or a number within 1e18",
        "line 14: params.epochs: must be greater than or equal to 1 (",
        "line 15: params.ephocs: there is no such setting (did you mean `epochs`?)",
        "line 16: params.gan_lr: must be true, false, a text",
        "line 18: network.noise_dim: must be greater than or equal to 1",
        "line 19: network.generator: no generator named 'nope'; there are ",
        "plan.toml: 11 problems",
    ):
        assert line in result.stderr, result.stderr


@pytest.mark.parametrize("command", ["plan", "create"])
def test_every_network_that_there_is_not_is_reported_with_its_line_and_beside_the_parameters(
    tmp_path: Path, command: str
) -> None:
    home, plan = tmp_path / "home", tmp_path / "plan.toml"
    run_fedcg("coordinator", "init", "--dir", str(home))
    names = 'generator = "nope"\ndiscriminator = "nil"'
    plan.write_text(_run("plan", "--example").stdout.replace("[network]", f"[network]\n{names}") + "epochs = 0\n")
    first = plan.read_text().split("\n").index('generator = "nope"') + 1
    result = _run(command, str(plan), *(["--dir", str(home)] if command == "create" else []))
    assert result.exit_code == 2
    for line in (
        "3 problems",
        f"line {first}: network.generator: no generator named 'nope'; there are ",
        f"line {first + 1}: network.discriminator: no discriminator named 'nil'; there are ",
        "params.epochs: must be greater than or equal to 1 (",
    ):
        assert line in result.stderr, result.stderr


def test_a_problem_between_settings_names_the_line_of_one(tmp_path: Path) -> None:
    home, plan = tmp_path / "home", tmp_path / "plan.toml"
    run_fedcg("coordinator", "init", "--dir", str(home))
    plan.write_text(_run("plan", "--example").stdout.replace("# min_clients = 3", "min_clients = 2"))
    line = plan.read_text().split("\n").index("min_clients = 2") + 1
    result = _run("create", str(plan), "--dir", str(home))
    assert result.exit_code == 2
    assert f"line {line}: min_clients: min_clients = 2 is below min_cohort = 3" in result.stderr


@pytest.mark.parametrize("command", ["plan", "create"])
def test_true_and_text_are_no_numbers_in_a_plan_and_its_parameters(tmp_path: Path, command: str) -> None:
    home, plan = tmp_path / "home", tmp_path / "plan.toml"
    run_fedcg("coordinator", "init", "--dir", str(home))
    text = re.sub(r"(?m)^rounds = .*", "rounds = true", _run("plan", "--example").stdout)
    plan.write_text(text + 'steps = true\nlr = true\nepochs = "5"\n')
    lines = plan.read_text().splitlines()
    words = [str(plan), *(["--dir", str(home)] if command == "create" else [])]
    result = _run(command, *words)
    assert result.exit_code == 2
    for line, field, kind in (
        ("rounds = true", "rounds", "whole number"),
        ("steps = true", "params.steps", "whole number"),
        ("lr = true", "params.lr", "number"),
        ('epochs = "5"', "params.epochs", "whole number"),
    ):
        assert f"line {lines.index(line) + 1}: {field}: must be a {kind}" in result.stderr, result.stderr
    plan.write_text(plan.read_text().replace("rounds = true", "rounds = 5"))
    assert "params.steps: must be a whole number" in _run(command, *words).stderr


def test_a_class_that_can_be_no_folder_is_refused_with_its_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    classes = r'classes = ["../x", "", ".", "..", "a/b", "a\\b", "a\tb", "no crack", "Käse"]'
    plan.write_text(re.sub(r"(?m)^classes = .*", lambda _: classes, _run("plan", "--example").stdout))
    line = plan.read_text().splitlines().index(classes) + 1
    result = _run("plan", str(plan))
    assert (result.exit_code, "plan.toml: 7 problems" in result.stderr) == (2, True), result.stderr
    for at, name in enumerate(("../x", "", ".", "..", "a/b", "a\\b", "a\tb")):
        assert f"line {line}: classes.{at}: {name!r} can't be a folder's name" in result.stderr, result.stderr


@pytest.mark.parametrize("command", ["plan", "create"])
def test_a_parameter_that_the_method_does_not_have_is_reported_in_words(tmp_path: Path, command: str) -> None:
    home, plan = tmp_path / "home", tmp_path / "plan.toml"
    run_fedcg("coordinator", "init", "--dir", str(home))
    plan.write_text(f"{_run('plan', '--example').stdout}ephocs = 3\nlr = -1.0\nlocal_epochs = 4\n")
    result = _run(command, str(plan), *(["--dir", str(home)] if command == "create" else []))
    assert result.exit_code == 2
    assert "local_epochs: there is no such setting" in result.stderr
    assert "ephocs: there is no such setting (did you mean `epochs`?)" in result.stderr
    assert "lr: must be greater than 0" in result.stderr
    assert "pydantic" not in result.stderr


def test_a_coordinator_toml_that_is_wrong_names_lines_and_nearest_settings(tmp_path: Path) -> None:
    home = tmp_path / "home"
    run_fedcg("coordinator", "init", "--dir", str(home))
    path = home / "coordinator.toml"
    path.write_text(path.read_text().replace("certificate_days", "certificate_dais"))
    number = 1 + next(n for n, line in enumerate(path.read_text().splitlines()) if "certificate_dais" in line)
    result = run_fedcg("coordinator", "run", "--dir", str(home))
    assert result.exit_code == 2
    assert f"line {number}: enrolment.certificate_dais" in result.stderr
    assert "did you mean `certificate_days`?" in result.stderr
