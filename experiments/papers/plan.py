"""Derives the runs of a published table from its name, with the differences from the published setting.

Runs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from pydantic import JsonValue

from experiments.data.source import DIGITS
from experiments.errors import OptionError
from experiments.papers.catalogue import Preset, Row, find_presets
from experiments.settings import of_method
from experiments.simulation.batch import PARAM_OPTIONS, PlannedRun, RunSetting, planned_run

Values = Mapping[str, JsonValue]
_OPTION_OF_PARAM = {param: option for option, param in PARAM_OPTIONS.items()}
_NAMED_DATA = (DIGITS, "torchvision:")


def plan_runs(
    name: str,
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    setting: Values | None = None,
    params: Mapping[str, Values] | None = None,
) -> tuple[PlannedRun, ...]:
    """Return the runs of a published table for `fedcg simulate --paper NAME`, each once: all rows of a seed before the next seed.

    Each has its differences from the published setting.

    Args:
        name: a preset or a group of presets.
        methods: only these methods, or rows as `method/variant`, and `method/` without a variant; empty: all.
        seeds: empty: the paper's.
        setting: the user's changes to the published setting.
        params: the user's parameters, by method; those under "" apply to every method.

    Raises:
        OptionError: no such table or row, or the user must provide data.
        ValidationError: names every bad value.
    """
    runs: dict[str, PlannedRun] = {}
    found = find_presets(name)
    offered = {name for preset in found for row in preset.rows.values() for name in row.names}
    unknown = [method for method in methods if method not in offered]
    if unknown:
        raise OptionError(f"{name} has no row {unknown[0]!r}; it has {', '.join(sorted(offered))}")
    for preset in found:
        if preset.needs is not None and not (setting or {}).get("data"):
            raise OptionError(f"{preset.name} needs {preset.needs}")
        for row in preset.rows.values():
            if row.needs is not None and row.key in methods:
                raise OptionError(f"{preset.name}: {row.key} can't be run; it needs {row.needs}")
        for seed in dict.fromkeys(seeds or preset.seeds):
            for row in preset.rows.values():
                if row.needs is None and (not methods or row.names & set(methods)):
                    typed = dict(setting or {})
                    for run in _runs_of(preset, row, seed, typed, of_method(params or {}, row.method)):
                        runs.setdefault(run.setting.name, run)
    return tuple(runs.values())


def _runs_of(preset: Preset, row: Row, seed: int, typed: Values, params: Values) -> Iterator[PlannedRun]:
    asked = dict(params)
    given = {**typed, **{option: asked.pop(name) for name, option in _OPTION_OF_PARAM.items() if name in asked}}
    home, key = row.home
    reduced = {**preset.reduced.setting, **preset.reduced.rows.get(key, {})}
    given = _with_defence_params(given, {**preset.setting, **row.setting, **reduced})
    own = {*row.own_params, *(param for option, param in PARAM_OPTIONS.items() if option in given)}
    budget = {name: value for name, value in preset.reduced.method.get(row.method, {}).items() if name not in own}
    typed_values = {**asked, **given}
    for values in product(
        *((typed_values[key],) if key in typed_values else tried for key, tried in row.search.items())
    ):
        choice = dict(zip(row.search, values, strict=True))
        published = {
            name: value if value in row.search[name] else row.search[name][0] for name, value in choice.items()
        }
        fields = {name: value for name, value in published.items() if name in RunSetting.model_fields}
        others = {name: value for name, value in published.items() if name not in fields}
        setting = {**preset.setting, **row.setting, **fields}
        named = {
            "paper": home + preset.name.removeprefix(preset.base),
            "method": row.method,
            "variant": variant_text(key.partition("/")[2], choice),
            "seed": seed,
        }
        run = planned_run(
            {**setting, **named, "params": {**row.params, **others}},
            {**reduced, **given, "params": {**budget, **asked}},
        )
        before, now = setting.get("data"), run.setting.data
        # Another location of the same images is not a difference; another data set by name is one.
        if before is not None and now != before and now.startswith(_NAMED_DATA):
            run = run.model_copy(update={"reduced": {**run.reduced, "data": (before, run.setting.data_name)}})
        yield run


def _with_defence_params(given: Values, under: Values) -> dict[str, JsonValue]:
    """Return the user's changes, with typed parameters of a defence overriding those of the row; a row without a defence gets none."""
    typed, before = given.get("defence_params"), under.get("defence_params")
    rest = {name: value for name, value in given.items() if name != "defence_params"}
    if not isinstance(typed, dict) or {**under, **rest}.get("defence") is None:
        return rest
    return {**rest, "defence_params": {**(before if isinstance(before, dict) else {}), **typed}}


def variant_text(variant: str, choice: Values) -> str:
    """Return a record's name for a row's variant with the searched values: `kd`, `mu=0.01`, `kd-lr=0.05`."""
    shown = (
        f"{key}={value:g}" if isinstance(value, (int, float)) else f"{key}={value}" for key, value in choice.items()
    )
    return "-".join([*([variant] if variant else []), *shown])
