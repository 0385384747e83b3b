"""Reads the papers' tables from the TOML files next to this module into presets. Independent of runs.

Comments in each file note what the paper leaves open, and our reading of it.

A preset is one column of a table (`fedcg:table1:cifar10-4`): the published setting and one row per method or variant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Annotated

import tomllib
from pydantic import BaseModel, Field, JsonValue

from experiments.errors import OptionError
from fedcg.errors import NOT_FOUND
from fedcg.learning.spec import ParameterValue
from fedcg.values import Value

_FILES = ("fedcg.toml", "fedmd_cg.toml", "ppidsg.toml", "antigan.toml", "own.toml", "sealed.toml")
_SettingValues = dict[str, JsonValue]
_Pair = Annotated[tuple[float, ...], Field(min_length=1, max_length=2)]


class _Strict(BaseModel, frozen=True, extra="forbid"):
    """An entry of a file; unknown fields are errors."""


class _RowEntry(_Strict):
    label: str
    params: dict[str, ParameterValue] = {}
    setting: _SettingValues = {}
    search: dict[str, tuple[ParameterValue, ...]] = {}
    same_as: str | None = None
    needs: str | None = None


class _ScenarioEntry(_Strict):
    label: str
    setting: _SettingValues
    needs: str | None = None
    stand_in: str | None = None
    rows: dict[str, _SettingValues] = {}


class _TableEntry(_Strict):
    title: str
    figures: dict[str, dict[str, tuple[_Pair, ...]]]


class ReducedEntry(_Strict):
    """What a reduced budget changes; `scenarios`: those that have it, empty for all."""

    scenarios: tuple[str, ...] = ()
    setting: _SettingValues = {}
    method: dict[str, dict[str, ParameterValue]] = {}
    rows: dict[str, _SettingValues] = {}


class _ClaimEntry(_Strict):
    text: str
    table: str
    scenarios: tuple[str, ...]
    below: tuple[tuple[str, str | float], ...] = ()
    about: tuple[tuple[str, str | float], ...] = ()
    margin: Annotated[float, Field(gt=0)] = 1.0


class _PaperFile(_Strict):
    id: str
    seeds: tuple[int, ...]
    measures: tuple[str, ...]
    reference: str | None = None
    setting: _SettingValues
    params: dict[str, ParameterValue]
    search: dict[str, tuple[ParameterValue, ...]] = {}
    method: dict[str, dict[str, ParameterValue]]
    row: dict[str, _RowEntry]
    scenario: dict[str, _ScenarioEntry]
    table: dict[str, _TableEntry]
    reduced: dict[str, ReducedEntry]
    claim: tuple[_ClaimEntry, ...]


class Published(Value):
    """A published figure, in percent; `std` is None if the paper prints none."""

    mean: float
    std: float | None = None


class Row(Value):
    """One row of a table.

    Attributes:
        key: `method` or `method/variant`, unique in its preset.
        label: the paper's name for the row.
        setting: fields of the run's setting, in addition to the preset's.
        params: every published parameter of the method; `own_params` names those that define this row.
        search: parameters for which the paper tried several values and reports the best.
        figures: published figure by measure; empty if the paper has none.
        home: preset and row under which this run is recorded; those of another table if both have the same run.
        needs: the missing requirement of its run; None if it can be run.
    """

    key: str
    label: str
    setting: Mapping[str, JsonValue]
    params: Mapping[str, ParameterValue]
    search: Mapping[str, tuple[ParameterValue, ...]]
    figures: Mapping[str, Published]
    home: tuple[str, str]
    own_params: tuple[str, ...] = ()
    needs: str | None = None

    @property
    def method(self) -> str:
        """The method's name."""
        return self.key.partition("/")[0]

    @property
    def variant(self) -> str:
        """The label of an ablation; empty for the unchanged method."""
        return self.key.partition("/")[2]

    @property
    def names(self) -> frozenset[str]:
        """The names that select the row: its method with all variants, or the row alone, `method/` without a variant."""
        return frozenset({self.method, f"{self.method}/{self.variant}"})


class Preset(Value):
    """One column of a published table.

    Attributes:
        name: `paper:table:scenario`, with `@budget` for a reduced one.
        setting: published fields of the run's setting, without method, seed and parameters.
        reduced: a reduced budget's changes: to `setting`, to a method's parameters, to a row's setting.
        measures: names of the figures; the paper's main figure is first.
        needs: data that the user must provide; None if it is available by name.
        stand_in: why this preset has no published figures; None for a published one.
        reference: the reference row of relative measures; None without such a measure.
    """

    name: str
    title: str
    setting: Mapping[str, JsonValue]
    rows: Mapping[str, Row]
    seeds: tuple[int, ...]
    measures: tuple[str, ...]
    needs: str | None = None
    stand_in: str | None = None
    reference: str | None = None
    reduced: ReducedEntry = ReducedEntry()

    @property
    def base(self) -> str:
        """The name without the budget."""
        return self.name.partition("@")[0]


class Claim(Value):
    """An order stated by a paper: in `preset`, row `lower` is below row `higher`; with a margin, they are about equal.

    A number as `higher` is a level in percent, such as chance.
    """

    text: str
    preset: str
    lower: str
    higher: str | float
    margin: float | None


def _paper_files() -> list[_PaperFile]:
    texts = [files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _FILES]
    return [_PaperFile.model_validate(tomllib.loads(text)) for text in texts]


@cache
def presets() -> Mapping[str, Preset]:
    """Return all presets with the published budget, by name."""
    found = {}
    for paper in _paper_files():
        for table in paper.table:
            for scenario in paper.table[table].figures:
                preset = _preset(paper, table, scenario)
                found[preset.name] = preset
    return found


@cache
def claims() -> tuple[Claim, ...]:
    """Return every order stated by the papers."""
    found = []
    for paper in _paper_files():
        for entry in paper.claim:
            for scenario in entry.scenarios:
                name = f"{paper.id}:{entry.table}:{scenario}"
                found += [Claim(entry.text, name, lower, higher, None) for lower, higher in entry.below]
                found += [Claim(entry.text, name, one, other, entry.margin) for one, other in entry.about]
    return tuple(found)


def _preset(paper: _PaperFile, table: str, scenario: str) -> Preset:
    entry, place = paper.table[table], paper.scenario[scenario]
    rows = {key: _row(paper, scenario, key, pairs) for key, pairs in entry.figures[scenario].items()}
    return Preset(
        name=f"{paper.id}:{table}:{scenario}",
        title=f"{entry.title}; {place.label}",
        setting={**paper.setting, **place.setting},
        rows=rows,
        seeds=paper.seeds,
        measures=paper.measures,
        needs=place.needs,
        stand_in=place.stand_in,
        reference=paper.reference,
    )


def _row(paper: _PaperFile, scenario: str, key: str, pairs: Sequence[_Pair]) -> Row:
    own = paper.row[key]
    meant = own.same_as or key
    source = paper.row[meant]
    # A run is recorded in the first table that has it in this scenario, so that it is only done once.
    first = next(name for name in paper.table if meant in paper.table[name].figures.get(scenario, {}))
    return Row(
        key=key,
        label=own.label,
        setting={**source.setting, **paper.scenario[scenario].rows.get(meant, {})},
        params={**paper.params, **paper.method.get(key.partition("/")[0], {}), **source.params},
        search={**paper.search, **source.search},
        figures={name: Published(*pair) for name, pair in zip(paper.measures, pairs, strict=False)},
        home=(f"{paper.id}:{first}:{scenario}", meant),
        own_params=tuple(source.params),
        needs=source.needs,
    )


@cache
def _budgets() -> Mapping[str, Mapping[str, ReducedEntry]]:
    return {paper.id: paper.reduced for paper in _paper_files()}


def find_presets(name: str, *, with_stand_ins: bool = False) -> tuple[Preset, ...]:
    """Return the presets for a name: one preset, or all of a group (`fedmd_cg:table1:cifar10`, `fedcg:table1`).

    Args:
        name: a preset, or the common start of several up to a `:` or a `-`; both optionally with `@budget`.
        with_stand_ins: whether the group includes our stand-ins; otherwise only if it has no other presets.

    Raises:
        OptionError: no such preset.
    """
    base, at, budget = name.partition("@")
    known = presets()
    group = (f"{base}:", f"{base}-")
    found = [known[base]] if base in known else [preset for key, preset in known.items() if key.startswith(group)]
    if not with_stand_ins:
        found = [preset for preset in found if preset.stand_in is None] or found
    if not found:
        near = [key for key in known if key.startswith(base.partition(":")[0] + ":")] or list(known)
        raise OptionError(f"no table {base!r}; choose {', '.join(near)}", exit_code=NOT_FOUND)
    return tuple(_with_budget(preset, budget) if at else preset for preset in found)


@cache
def row_fields(name: str) -> frozenset[str]:
    """Return the fields of the setting, and `params.NAME`, that differ between rows of a preset, with or without a budget.

    Empty for the name of a removed preset, as in old records.
    """
    base, _, budget = name.partition("@")
    if base not in presets():
        return frozenset()
    fields = {field for row in presets()[base].rows.values() for field in row.setting}
    reduced = _budgets()[base.partition(":")[0]].get(budget)
    if reduced is not None:
        fields |= {field for row in reduced.rows.values() for field in row}
        fields |= {f"params.{param}" for params in reduced.method.values() for param in params}
    return frozenset(fields)


def _with_budget(preset: Preset, budget: str) -> Preset:
    budgets = _budgets()[preset.name.partition(":")[0]]
    if budget not in budgets:
        raise OptionError(f"no budget {budget!r} for {preset.name}; choose {', '.join(budgets)}")
    reduced = budgets[budget]
    if reduced.scenarios and preset.name.rpartition(":")[2] not in reduced.scenarios:
        raise OptionError(
            f"the budget {budget!r} does not apply to {preset.name}, only to {', '.join(reduced.scenarios)}"
        )
    return replace(preset, name=f"{preset.base}@{budget}", reduced=reduced)
