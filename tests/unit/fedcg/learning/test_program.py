"""A program by its name: where its code lies, its digest, what is wrong with it; and projects."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcg.errors import FedcgError, users_trace
from fedcg.learning.program import Program
from fedcg.learning.project import new_project, plan_text, project_plan
from fedcg.learning.spec import FederationPlan, plan_from_mapping
from tests.support.commands import run_fedcg

tomllib = pytest.importorskip("tomllib")


def test_a_digest_covers_a_file_or_a_whole_package_and_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "alone_here.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "packed_here").mkdir()
    for name in ("__init__.py", "more.py"):
        (tmp_path / "packed_here" / name).write_text("raise RuntimeError('imported')")
    alone, packed = (Program(name, tmp_path) for name in ("alone_here:client", "packed_here.more:client"))
    before = alone.digest(), packed.digest()
    (tmp_path / "packed_here" / "__init__.py").write_text("pass")
    assert (alone.digest(), packed.digest() != before[1]) == (before[0], True)


WRONG = {
    "no module absent_here in": ("absent_here:client", ""),
    "can't be imported: ModuleNotFoundError: No module named 'nothing_of_this'": (
        "wrong_import:client",
        "import nothing_of_this",
    ),
    "the module has no function client": ("wrong_name:client", "x = 1"),
    r"client\('a'\) failed: ZeroDivisionError: division by zero \(wrong_call.py, line 2": (
        "wrong_call:client",
        "def client(site):\n    return 1 / 0",
    ),
    r"client\('a'\) returned a int, not a fedcg.Client": ("wrong_value:client", "def client(site):\n    return 1"),
    "a module of that name is loaded from": ("json:client", "def client(site):\n    return 1"),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_with_a_program_is_one_sentence(words: str, tmp_path: Path) -> None:
    name, code = WRONG[words]
    if code:
        (tmp_path / f"{name.partition(':')[0]}.py").write_text(code)
    program = Program(name, tmp_path)
    with pytest.raises(FedcgError, match=words) as caught:
        program.client("a", 0)
    assert ("1 / 0" in users_trace(caught.value)) == ("1 / 0" in code)


def test_a_file_beside_goes_before_an_installed_one_in_digest_and_call_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("installed", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "twice_there.py").write_text(f"SITES = ['{name}']")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    beside, elsewhere = (Program("twice_there:client", tmp_path / name) for name in ("beside", "elsewhere"))
    assert (beside.sites(), elsewhere.sites(), beside.sites()) == (["beside"], ["installed"], ["beside"])
    assert beside.digest() != elsewhere.digest()


def test_a_projects_plan_follows_from_its_program_and_keeps_what_its_owner_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "first one"
    new_project(folder, "tables")
    path = folder / "plan.toml"
    written = plan_from_mapping(tomllib.loads(path.read_text()))
    assert (written.federation, written.method, written.network.split) == ("first-one", "fedcg", "program")
    path.write_text(path.read_text().replace("rounds = 10", "rounds = 3\ndeadline_s = 60.0"))
    again = FederationPlan.model_validate(tomllib.loads(plan_text(project_plan(folder))))
    assert (again.rounds, again.deadline_s, again.network) == (3, 60.0, written.network)
    with pytest.raises(FedcgError, match="already exists"):
        new_project(folder, "tables")


@pytest.mark.parametrize("template", ["trainer", "signals", "tables"])
def test_a_project_is_simulated_with_its_plan_and_errors_of_its_code_show_where(tmp_path: Path, template: str) -> None:
    folder = tmp_path / "again"
    assert run_fedcg("new", str(folder), "--template", template).exit_code == 0
    asked = ("simulate", str(folder), "--rounds", "1", "--local-epochs", "1", "--out", str(tmp_path / "out"), "--json")
    done = run_fedcg(*asked)
    assert done.exit_code == 0, done.output
    method = "fedsplit" if template == "trainer" else "fedcg"
    assert f'"method":"{method}"' in done.stdout.replace(" ", "")
    refused = run_fedcg("simulate", str(folder), "--partition", "iid", "--rounds", "1")
    assert refused.exit_code == 2
    assert "partition: not allowed here" in refused.output
