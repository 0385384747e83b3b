"""From the name of a published table to the runs it needs, with what differs from the published setting. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from experiments.batch import Batch, PlannedRun, RunSetting
from experiments.errors import OptionError
from experiments.papers.catalogue import Preset, Row, find_presets, presets
from fedcg.learning.spec import ParameterValue

Values = Mapping[str, ParameterValue]
# Fields of the setting that are parameters of every method: `--set lr=0.1` means what `--lr 0.1` means.
_SETTING_OF_PARAM = {"epochs": "local_epochs", "steps": "local_steps", "batch_size": "batch_size", "lr": "lr"}
# They don't decide what is computed, or say so themselves.
_NO_DIFFERENCE = frozenset({"method", "seed", "params", "paper", "variant", "device", "threads", "shadow"})
_NAMED_DATA = ("digits", "torchvision:")


@dataclass(frozen=True)
class TableRun:
    """One run of a table, before it is checked.

    Attributes:
        paper: the preset under which it is recorded.
        variant: the row's variant and the searched values, as the record shows them.
        setting: fields of the run's setting, without method, seed, variant and parameters.
        params: the method's parameters.
        reduced: what differs from the published setting: name to (published, run).
    """

    paper: str
    method: str
    variant: str
    seed: int
    setting: Values
    params: Values
    reduced: Mapping[str, tuple[object, object]]

    def planned(self) -> PlannedRun:
        """The run as `fedcg simulate` does it.

        Raises:
            ValidationError: names every bad value.
        """
        named = {"paper": self.paper, "method": self.method, "variant": self.variant, "seed": self.seed}
        setting = RunSetting.model_validate({**self.setting, **named, "params": self.params})
        return PlannedRun(setting=setting, reduced=dict(self.reduced))


def table_batch(
    name: str,
    options: Values,
    given: frozenset[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    method_params: Mapping[str, Values],
) -> Batch:
    """What `fedcg simulate --paper NAME` runs.

    Args:
        name: a preset or a group of presets.
        options: fields of the run's setting by name, as the command line has them.
        given: which of them were typed; the others are the table's.
        methods: only these methods or rows; empty means all.
        seeds: empty means the paper's.
        method_params: parameters by method; those under "" are every method's.

    Raises:
        OptionError: no such table or row, or data that the user has to bring and did not.
        ValidationError: names every bad value.
    """
    typed = {key: value for key, value in options.items() if key in given or key in _NO_DIFFERENCE}
    runs = plan_runs(name, methods=methods, seeds=seeds, setting=typed, params=method_params)
    return Batch(runs=tuple(run.planned() for run in runs))


def plan_runs(
    name: str,
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    setting: Values | None = None,
    params: Mapping[str, Values] | None = None,
) -> tuple[TableRun, ...]:
    """The runs of a published table, each once: all rows of a seed before the next seed.

    Args:
        name: a preset or a group of presets.
        methods: only these methods, or rows as `method/variant`; empty means all.
        seeds: empty means the paper's.
        setting: what the user puts over the published setting.
        params: parameters that the user gives, by method; those under "" are every method's.

    Raises:
        OptionError: no such table or row, or data that the user has to bring and did not.
    """
    runs: dict[tuple[str, str, str, int], TableRun] = {}
    found = find_presets(name)
    offered = {key for preset in found for key in preset.rows} | {
        row.method for preset in found for row in preset.rows.values()
    }
    unknown = [method for method in methods if method not in offered]
    if unknown:
        raise OptionError(f"{name} has no row {unknown[0]!r}; it has {', '.join(sorted(offered))}")
    for preset in found:
        if preset.needs is not None and not (setting or {}).get("data"):
            raise OptionError(f"{preset.name} needs {preset.needs}")
        for seed in dict.fromkeys(seeds or preset.seeds):
            for row in preset.rows.values():
                if not methods or row.key in methods or row.method in methods:
                    for run in _runs_of(preset, row, seed, setting or {}, params or {}):
                        runs.setdefault((run.paper, run.method, run.variant, run.seed), run)
    return tuple(runs.values())


def _runs_of(preset: Preset, row: Row, seed: int, typed: Values, params: Mapping[str, Values]) -> tuple[TableRun, ...]:
    asked = {**params.get("", {}), **params.get(row.method, {})}
    given = {**typed, **{field: asked.pop(key) for key, field in _SETTING_OF_PARAM.items() if key in asked}}
    choices = {key: _choices(key, values, {**asked, **given}) for key, values in row.search.items()}
    published = {**preset.setting, **row.setting}
    final = {**published, **preset.changed, **given}
    home, key = row.home
    budget = preset.name.removeprefix(preset.base)
    runs = []
    for values in product(*choices.values()):
        choice = dict(zip(choices, values, strict=True))
        fields = {name: value for name, value in choice.items() if name in RunSetting.model_fields}
        others = {name: value for name, value in choice.items() if name not in fields}
        runs.append(
            TableRun(
                paper=home + budget,
                method=row.method,
                variant=variant_text(key.partition("/")[2], choice),
                seed=seed,
                setting={**final, **fields},
                params={**row.params, **asked, **others},
                reduced=_differences(published, final, row, asked, choice),
            )
        )
    return tuple(runs)


def _choices(key: str, published: tuple[ParameterValue, ...], given: Values) -> tuple[ParameterValue, ...]:
    return (given[key],) if key in given else published


def variant_text(variant: str, choice: Values) -> str:
    """How a record names a row's variant with the searched values: `kd`, `mu=0.01`, `kd-lr=0.05`."""
    return "-".join([*([variant] if variant else []), *(f"{key}={_shown(value)}" for key, value in choice.items())])


def _shown(value: ParameterValue) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _differences(
    published: Values, final: Values, row: Row, asked: Values, choice: Values
) -> dict[str, tuple[object, object]]:
    """Names to (published, run). Where the images lie is no difference, unless another named data set is taken."""
    defaults = RunSetting().model_dump()
    differences: dict[str, tuple[object, object]] = {}
    for name, value in final.items():
        before = published.get(name, defaults.get(name))
        same_images = name == "data" and not str(value).startswith(_NAMED_DATA)
        if name not in _NO_DIFFERENCE and name not in row.search and value != before and not same_images:
            differences[name] = (before, value)
    for name, value in asked.items():
        if name not in row.search and value != row.params.get(name):
            differences[name] = (row.params.get(name), value)
    for name, value in choice.items():
        if value not in row.search[name]:
            differences[name] = (list(row.search[name]), value)
    return differences


def all_published() -> tuple[TableRun, ...]:
    """Every run that the published tables need, each once; stand-ins are none of them."""
    runs: dict[tuple[str, str, str, int], TableRun] = {}
    for preset in presets().values():
        if preset.stand_in is None:
            needed = {"data": "brought"} if preset.needs else None
            for run in plan_runs(preset.name, setting=needed):
                runs.setdefault((run.paper, run.method, run.variant, run.seed), run)
    return tuple(runs.values())
