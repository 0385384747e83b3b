"""The example in docs/adding-a-method.md is a method: installed as a package of the user's own, it runs a federation."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edge_client.config import PolicySection
from edge_client.firewall import check_spec
from fedcg.learning import methods, registry
from fedcg.learning.errors import ExtensionError, NetworkError
from fedcg.learning.networks.plans import method_layouts
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.simulation.simulation import Schedule, simulate
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import Part, TensorLayout
from tests.support.installed import importable, register
from tests.support.learning.learning_cases import party_of, quick_spec, same_parts

PAGE = Path(__file__).parents[5] / "docs" / "adding-a-method.md"


def code() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from importable(tmp_path, monkeypatch)


def install(folder: Path, name: str, held: str) -> None:
    (folder / "our_package.py").write_text(code().replace('name="fedproto"', f'name="{held}"'))
    register(folder, "ours", "fedcg.methods", name, "our_package:METHOD")


def test_the_page_shows_the_file_as_it_is() -> None:
    assert code() == (Path(methods.__path__[0]) / "fedproto.py").read_text()


def test_an_installed_method_is_listed_and_runs_as_the_built_in_one(folder: Path) -> None:
    install(folder, "our_prototypes", "our_prototypes")
    assert "our_prototypes" in method_names()
    ours, built_in = (
        simulate(party_of(name, ("a", "b")), Schedule(rounds=2)) for name in ("our_prototypes", "fedproto")
    )
    assert set(ours.aggregate.parts) == {Part.STATISTICS}
    assert same_parts(ours.aggregate.parts, built_in.aggregate.parts)
    assert ours.curves["a"][-1].accuracy_after is not None
    assert not torch.equal(*(ours.states[name].parts[Part.EXTRACTOR]["0.weight"] for name in ("a", "b")))


def test_a_method_of_another_name_than_its_entry_is_refused(folder: Path) -> None:
    install(folder, "our_prototypes", "theirs")
    with pytest.raises(ExtensionError, match="our_package:METHOD holds is named 'theirs'"):
        get_method("our_prototypes")


def test_a_package_that_cannot_be_imported_is_named(folder: Path) -> None:
    register(folder, "ours", "fedcg.methods", "our_prototypes", "nowhere:METHOD")
    with pytest.raises(ExtensionError, match="nowhere:METHOD: ModuleNotFoundError"):
        get_method("our_prototypes")


def test_a_method_with_masks_and_no_statistics_of_its_own_to_put_them_on_is_refused(folder: Path) -> None:
    (folder / "our_package.py").write_text(
        "from dataclasses import replace\n"
        "from fedcg.learning.methods import fedsplit\n"
        "payload = replace(fedsplit.METHOD.payload, is_summed=True)\n"
        "METHOD = replace(fedsplit.METHOD, name='masked', payload=payload)\n"
    )
    register(folder, "ours", "fedcg.methods", "masked", "our_package:METHOD")
    with pytest.raises(
        ExtensionError,
        match="our_package:METHOD: ValueError: is_summed puts masks on whole numbers of the part statistics",
    ):
        get_method("masked")
    method = get_method("fedprobe")
    for without in ({"statistics": None}, {"up": frozenset({Part.CLASSIFIER})}):
        with pytest.raises(ValueError, match="is_summed puts masks on"):
            replace(method.payload, **without)
    means = (TensorLayout(name="means", dtype="int64", shape=(3,), low=0.0, high=9.0),)
    with pytest.raises(NetworkError, match="fedprobe: its masked statistics must be the tensors outputs and weight"):
        method_layouts(
            quick_spec("fedprobe"), replace(method, payload=replace(method.payload, statistics=lambda _spec: means))
        )


def test_a_package_cannot_take_the_name_of_a_built_in_method(folder: Path) -> None:
    spec = quick_spec("local")
    registry.registered.cache_clear()
    install(folder, "fedproto", "fedproto")
    with pytest.raises(ExtensionError, match=r"registers 'fedproto' in fedcg\.methods .* that name is built in"):
        get_method("fedproto")
    refusal = check_spec(spec, PolicySection())
    assert refusal is not None
    assert refusal[0] is DeclineReason.SPEC_REFUSED
    assert "give the entry another name" in refusal[1]
