"""The operator's plan.toml: an example to start from, and errors in words, all at once."""

import re
from pathlib import Path

import pytest
import tomllib
from typer.testing import Result

from coordinator.errors import PlanError
from coordinator.operations import create_federation
from coordinator.operations.create_federation import check_plan, example_plan, in_a_process, make_artifacts
from fedcg.learning.spec import FederationPlan, ImageForm
from tests.support.commands import run_fedcg


def _run(*arguments: str) -> Result:
    return run_fedcg("federation", *arguments)


def test_the_example_for_a_frozen_backbone_can_be_used_as_it_is(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(_run("plan", "--example", "--frozen").stdout)
    assert tomllib.loads(plan.read_text())["input"]["mean"] == [0.5, 0.5, 0.5]  # as its weights were trained
    assert "the plan is valid (analytic)" in _run("plan", str(plan)).stdout


def test_the_example_has_every_field_with_its_default_and_makes_a_federation(tmp_path: Path) -> None:
    example = _run("plan", "--example").stdout
    plan = tmp_path / "plan.toml"
    plan.write_text(re.sub(r"(?m)^# (\w+ = .*)$", r"\1", example))  # with what it only shows
    full, short = tomllib.loads(plan.read_text()), tomllib.loads(example)
    assert set(full) == {
        name for name, field in FederationPlan.model_fields.items() if field.is_required() or field.default is not None
    }
    tables = FederationPlan.model_json_schema()["$defs"]
    for table, name in (("ImageForm", "input"), ("NetworkChoice", "network")):
        fields = tables[table]["properties"].items()
        assert set(full[name]) == {field for field, about in fields if about.get("default", "") is not None}
    del full["params"], short["params"]
    assert FederationPlan.model_validate(full) == FederationPlan.model_validate(short)
    assert _run("plan", str(plan)).exit_code == 0
    home = tmp_path / "home"
    assert run_fedcg("coordinator", "init", "--dir", str(home)).exit_code == 0
    created = _run("create", str(plan), "--dir", str(home))
    assert created.exit_code == 0, created.output
    assert "Created federation casting" in created.stdout


def test_a_process_of_its_own_makes_the_same_artifacts_and_tells_why_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = ImageForm(mode="L", height=28, width=28, mean=(0.5,), std=(0.5,))
    plan = FederationPlan(federation="tiny", classes=("x", "y"), method="fedsplit", rounds=1, input=form)
    here = make_artifacts(plan, tmp_path / "here")
    monkeypatch.setattr(create_federation, "in_a_process", in_a_process)
    assert make_artifacts(plan, tmp_path / "there") == here
    with pytest.raises(PlanError, match=r"can't be completed: 1 problem\n  params.nonsense: there is no such setting"):
        check_plan(plan.model_copy(update={"params": {"nonsense": 1}}))


def test_a_plan_that_takes_too_long_or_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    form = ImageForm(mode="RGB", height=1024, width=1024, mean=(0.5,) * 3, std=(0.5,) * 3)
    plan = FederationPlan(federation="large", classes=("x", "y"), method="fedcg", rounds=1, input=form)
    with pytest.raises(PlanError, match=r"its parts have \d{3},\d{3},\d{3} numbers.*smaller images"):
        check_plan(plan)
    monkeypatch.setattr(create_federation, "in_a_process", in_a_process)
    monkeypatch.setattr(create_federation, "COMPLETE_S", 0.05)
    with pytest.raises(PlanError, match=r"takes more than 0\.05 s"):
        check_plan(plan)


Row = tuple[str, str]
"""A line of a plan, and how the report of what is wrong with it begins; empty where nothing is."""
EXAMPLE: list[Row] = [(line, "") for line in example_plan().splitlines()]
NO_GENERATOR = ('generator = "nope"', "network.generator: no generator 'nope'; choose from ")


def with_rows(start: str, *rows: Row) -> list[Row]:
    """The example with these rows in place of its line that starts so."""
    at = next(number for number, (line, _) in enumerate(EXAMPLE) if line.startswith(start))
    return [*EXAMPLE[:at], *rows, *EXAMPLE[at + 1 :]]


TENSORS: list[Row] = [*EXAMPLE[: EXAMPLE.index(("[input]", ""))], ("[input]", ""), ('kind = "tensor"', "")]
WRONG: dict[str, list[Row]] = {
    "fields": [
        ('federation = "Shapes One"', "federation: must be 1 to 63 small letters, digits and dashes"),
        ('classes = ["a"]', "classes: "),
        ('method = "fedgc"', "method: there is no method 'fedgc'; choose one of "),
        ("rounds = 0", "rounds: must be greater than or equal to 1"),
        ("min_client = 3", "min_client: there is no such setting (did you mean `min_clients`?)"),
        ('codec = "f8"', "codec: must be 'f32', 'f16', 'i8', 'f16-delta' or 'i8-delta'"),
        ("[input]", "input.width: is missing"),
        ('mode = "GRAY"', "input.mode: must be 'L' or 'RGB'"),
        ("height = 2", "input.height: must be greater than or equal to 4"),
        ("mean = [0.5]", ""),
        ("std = [0]", "input.std.0: must be greater than or equal to 0.0001"),
    ],
    "what method and networks refuse, beside fields": [
        ('federation = "shapes"', ""),
        ('classes = ["a", "b", "a"]', "classes: 'a' is listed 2 times; list each class once"),
        ('method = "fedcg"', ""),
        ("rounds = 0", "rounds: must be greater than or equal to 1"),
        ("min_clients = 2", "min_clients: min_clients = 2 is below min_cohort = 3"),
        ("[input]", ""),
        ('mode = "L"', ""),
        ("height = 32", ""),
        ("width = 32", ""),
        ("mean = [0.5, 0.5]", "input.mean: must have one number for each channel, 1 with mode L, not 2"),
        ("std = [1e-300]", "input.std.0: must be greater than or equal to 0.0001"),
        ("[params]", ""),
        ("lr = 1e300", "params.lr: must be true, false, a text of at most 200 characters or a number within ±1e18"),
        ("epochs = 0", "params.epochs: must be greater than or equal to 1 ("),
        ("ephocs = 3", "params.ephocs: there is no such setting (did you mean `epochs`?)"),
        ("gan_lr = [1]", "params.gan_lr: must be true, false, a text"),
        ("[network]", ""),
        ("noise_dim = 0", "network.noise_dim: must be greater than or equal to 1"),
        NO_GENERATOR,
    ],
    "every network, beside parameters": [
        *with_rows(
            "[network]",
            ("[network]", ""),
            NO_GENERATOR,
            ('discriminator = "nil"', "network.discriminator: no discriminator 'nil'; choose from "),
        ),
        ("epochs = 0", "params.epochs: must be greater than or equal to 1 ("),
    ],
    "tensors": [
        *TENSORS,
        ("shape = [6, 0]", "input.shape.1: must be greater than or equal to 1"),
        ('dtype = "int8"', "input.dtype: must be 'uint8' or 'float32'"),
        ("mean = [0.0]", ""),
        ("std = []", "input.std: goes with mean: set both, or neither (as `mean`; both or neither)"),
        ("height = 32", "input.height: there is no such setting (known: kind, shape, dtype, mean, std)"),
    ],
    "a network of images, for tensors": [
        *TENSORS,
        ("shape = [6, 100]", ""),
        ("[network]", ""),
        ('split = "image_small"', "network.split: image_small needs images, not tensors of shape [6, 100]"),
    ],
    "a pair of settings": with_rows(
        "# min_clients = 3", ("min_clients = 2", "min_clients: min_clients = 2 is below min_cohort = 3")
    ),
    "true and text where a number belongs": [
        *with_rows("rounds = ", ("rounds = true", "rounds: must be a whole number")),
        ("steps = true", "params.steps: must be a whole number"),
        ("lr = true", "params.lr: must be a number"),
        ('epochs = "5"', "params.epochs: must be a whole number"),
    ],
}


@pytest.mark.parametrize(
    ("command", "wrong"),
    [*(("plan", wrong) for wrong in WRONG), ("create", "fields"), ("create", "every network, beside parameters")],
)
def test_all_that_is_wrong_with_a_plan_is_reported_at_once_by_line(tmp_path: Path, command: str, wrong: str) -> None:
    home, plan, rows = tmp_path / "home", tmp_path / "plan.toml", WRONG[wrong]
    run_fedcg("coordinator", "init", "--dir", home)
    plan.write_text("\n".join(line for line, _ in rows))
    result = _run(command, str(plan), *(["--dir", str(home)] if command == "create" else []))
    problems = [f"line {number}: {problem}" for number, (_, problem) in enumerate(rows, 1) if problem]
    assert (result.exit_code, f"{len(problems)} problem" in result.stderr) == (2, True), result.stderr
    for problem in problems:
        assert problem in result.stderr, result.stderr
    assert "pydantic" not in result.stderr


def test_a_class_that_can_be_no_folder_is_refused_with_its_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    names = r'classes = ["../x", "", ".", "..", "a/b", "a\\b", "a\tb", "no crack", "Käse"]'
    plan.write_text("\n".join(line for line, _ in with_rows("classes = ", (names, ""))))
    line = plan.read_text().splitlines().index(names) + 1
    result = _run("plan", str(plan))
    assert (result.exit_code, "plan.toml: 7 problems" in result.stderr) == (2, True), result.stderr
    for at, name in enumerate(("../x", "", ".", "..", "a/b", "a\\b", "a\tb")):
        assert f"line {line}: classes.{at}: {name!r} can't be a folder name" in result.stderr, result.stderr
