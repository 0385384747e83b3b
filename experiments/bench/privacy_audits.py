"""Audits of updates with a planted leak, and of updates that reveal nothing, for `fedcg bench privacy`.

An update is that of a client in the last round of a simulated federation like the demo. The attacks that a plant can
touch run on the planted update, coded as a device codes it; the other outcomes are those of the update without the
plant. In a null audit the images "trained on" are images that no client trained on, with class shares drawn for each seed.
"""

import functools
import itertools
import json
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import audit
from audit.attacks.attack import Effort, chosen_attacks
from audit.choices import ATTACKS, parse_gate
from audit.errors import AuditError
from audit.evidence import Case, inputs_and_features, joined, read_updates
from audit.measures import Outcome, proportion
from audit.recording.leakage import PrivateTensor, WireTensor, compare, private_tensors
from audit.report import Result, findings_of, judge
from audit.run import AuditOptions, case_of
from experiments.bench.planted_leaks import PLANTS, as_sent
from experiments.errors import OptionError, RunError
from experiments.record import bench_record, write_record
from experiments.simulation.recorded_updates import truth_file
from fedcg.child_python import module_command
from fedcg.config_file import read_values
from fedcg.files import READABLE, replace_durably
from fedcg.learning.image_set import ImageSet

GATE = "mia_auc<0.75"
"""The gate that docs/how-to/audit-gate.md shows."""
COMPARE, REPORT = "compare", "the report"
_FOUND, _FEWEST = 0.8, 20  # of a smallest leak: the share of plants that are found, and the plants
_SKEW = 0.5  # Dirichlet, as the demo's class shares
_DEMO = shlex.split(
    "simulate --data digits --clients 4 --rounds 5 --keep-updates 5 --evaluate-every 5 --start cohort --codec i8-delta "
    "--aggregate-codec f16 --no-shadow --no-plot --no-tensorboard"
)
Row = Mapping[str, Any]
Updates = Mapping[int | None, Sequence[AuditOptions]]
"""The audits' options for clients' updates, by number of images."""
Job = tuple[dict[str, Any], int, Callable[[], dict[str, Any]]]
"""What a row is grouped by, its seed, and what returns its content: searches `tried` and `red`, and `figures`."""


def recordings(out: Path, federations: int, images: int | None = None) -> list[AuditOptions]:
    """Simulate federations like the demo with seeds 0, 1, ..., unless they are in the folder; return all clients' updates.

    Raises:
        RunError: a simulation failed.
    """
    folder = out / f"runs-{images or 'all'}"
    size = () if images is None else ("--images-per-client", images)
    words = [*_DEMO, *size, "--seeds", f"0-{federations - 1}", "--out", folder]
    done = subprocess.run(module_command("fedcg", *words), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"fedcg {' '.join(map(str, words))}: {done.stderr.strip()[-500:]}")
    return [
        AuditOptions(run, data, out, truth_file(run, data.stem, 5), auxiliary=run / "auxiliary.npz", client=data.stem)
        for run in sorted((folder / "updates").iterdir())
        for data in sorted((run / "truth").glob("client-?.npz"))
    ]


def default_case(update: AuditOptions, seed: int) -> Case:
    """The case of a device with the default policy: it does not report its label counts, which simulated clients do."""
    case = case_of(replace(update, seed=seed), read_updates(update.updates))
    return replace(case, view=replace(case.view, report=case.view.report.model_copy(update={"label_counts": None})))


def _outcomes(case: Case, effort: Effort, names: Iterable[str] = ATTACKS) -> dict[str, Outcome]:
    return {one.name: one.run(case, effort, lambda _done, _total: None) for one in chosen_attacks(tuple(names))}


def red(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the attacks that a report with these outcomes shows as leaks of the update."""
    attacks = chosen_attacks(tuple(outcomes))
    findings = findings_of(attacks, [outcomes[attack.name] for attack in attacks])
    return [one.attack.name for one in findings if one.result is Result.LEAKED]


def plant_jobs(updates: Updates, kinds: Sequence[str], count: int, effort: Effort) -> Iterator[Job]:
    """Yield `count` jobs for each number of images, kind of plant and strength; seeds 1000, 1001, ... take turns in the updates."""
    whole = functools.cache(lambda update: _outcomes(default_case(update, 0), effort))

    @functools.cache
    def secrets(update: AuditOptions) -> list[PrivateTensor]:
        files = [update.private] if update.private else []
        return private_tensors(files) + inputs_and_features(read_updates(update.updates).spec, update.data, files)

    def row(update: AuditOptions, kind: str, strength: float, seed: int) -> dict[str, Any]:
        plant, case = PLANTS[kind], default_case(update, seed)
        case = as_sent(plant.put(case, strength, case.streams.at("plant", kind).generator("draws")))
        sent = [WireTensor("", name, one.numpy()) for some in case.view.update.values() for name, one in some.items()]
        outcomes = _outcomes(case, effort, plant.attacks) if plant.attacks else {}
        leaks = red({**whole(update), **outcomes}) if outcomes else []
        possible = [one for some in outcomes.values() for one in some.figures if one.is_possible and one.is_of_update]
        return {
            "images": len(case.truth.train),
            "tried": [COMPARE, *outcomes],
            "red": [COMPARE] * bool(compare(sent, secrets(update))) + [name for name in leaks if name in outcomes],
            "figures": {one.name: one.value.value for one in sorted(possible, key=lambda one: one.gain.value)},
        }

    for size, kind in itertools.product(updates, kinds):
        for strength, seed in itertools.product(PLANTS[kind].strengths, range(1000, 1000 + count)):
            update = updates[size][seed % len(updates[size])]
            group = {"size": size, "plant": kind, "strength": strength}
            yield group, seed, functools.partial(row, update, kind, strength, seed)


def swapped(case: Case, pool: ImageSet) -> Case:
    """Return the case with images of a pool that no client trained on; the update reveals nothing about them.

    The class shares are drawn for each seed. At most half of a class is "trained on", the rest is held out.
    """
    drawn, classes = np.random.default_rng(case.streams.seed("swapped")), range(case.view.spec.class_count)
    wanted = drawn.dirichlet([_SKEW] * len(classes)) * len(case.truth.train)
    rows = [torch.from_numpy(drawn.permutation(torch.nonzero(pool.labels == label).flatten())) for label in classes]
    sizes = [min(round(share), len(some) // 2) for share, some in zip(wanted, rows, strict=True)]
    inside = torch.cat([some[:size] for some, size in zip(rows, sizes, strict=True)])
    outside = torch.cat([some[size:] for some, size in zip(rows, sizes, strict=True)])
    return replace(case, truth=replace(case.truth, train=pool.rows(inside), held_out=pool.rows(outside)))


def null_jobs(sizes: Updates, _: Sequence[str], count: int, effort: Effort) -> Iterator[Job]:
    """Yield `count` null audits; seeds 2000, 2001, ... take turns in the updates."""
    (updates,) = sizes.values()

    def row(update: AuditOptions, seed: int) -> dict[str, Any]:
        cohort = [default_case(one, seed).truth.held_out for one in updates if one.updates == update.updates]
        case = swapped(default_case(update, seed), functools.reduce(joined, cohort))
        outcomes = _outcomes(
            case, effort, [name for name in ATTACKS if name != "epsilon"]
        )  # it trains canaries of its own
        leaks, gates = red(outcomes), judge(parse_gate(GATE), list(outcomes.values()))
        leaks += [REPORT] * bool(leaks) + [f"gate {one.condition}" for one in gates if not one.passed]
        tried = [name for name, one in outcomes.items() if one.figures]
        return {"tried": [*tried, REPORT, f"gate {GATE}"], "red": leaks, "figures": {}, "images": 0}

    for seed in range(2000, 2000 + count):
        yield {}, seed, functools.partial(row, updates[seed % len(updates)], seed)


def run(kind: str, out: Path, echo: Callable[[str], None], setting: Row, *, write: bool) -> Row:
    """Do the jobs that the record in the folder lacks, and write it after each; return it with the `rates`.

    Args:
        kind: `plants` or `null`.
        out: folder of recordings and record.
        echo: shows progress.
        setting: effort, images, plant, count and federations, as options of the command.
        write: also write the audit's `detection.toml`.

    Raises:
        OptionError: an unknown plant.
        RunError: a simulation failed, or the record is of another version.
    """
    if unknown := set(setting["plant"]) - set(PLANTS):
        raise OptionError(f"no plant {', '.join(sorted(unknown))}; choose from {', '.join(PLANTS)}")
    effort, file = Effort(setting["effort"]), out / f"{kind}-{setting['effort']}.json"
    head = bench_record(f"bench privacy {kind}", setting, **setting)
    before = json.loads(file.read_text()) if file.exists() else {**head, "rows": []}
    if before["versions"] != head["versions"]:
        raise RunError(f"{file} was measured with other versions: choose another --out")
    sizes = (None,) if kind == "null" else setting["images"]
    updates = {size: recordings(out, setting["federations"], size) for size in sizes}
    jobs = null_jobs if kind == "null" else plant_jobs
    record = {**head, "date": before["date"], "rows": before["rows"]}
    done = [(row["group"], row["seed"]) for row in record["rows"]]
    wanted = jobs(updates, setting["plant"] or tuple(PLANTS), setting["count"], effort)
    todo = [job for job in wanted if job[:2] not in done]
    for number, (group, seed, job) in enumerate(todo, 1):
        record["rows"].append({"group": group, "seed": seed, **job()})
        shown = ", ".join(record["rows"][-1]["red"]) or "nothing"
        echo(f"{number} of {len(todo)}: {', '.join(map(str, group.values()))} seed {seed}: {shown}")
        write_record(record, file)
    found = rates(record["rows"])
    if write and kind == "null":
        of_attacks = [(name, red, one["of"]) for one in found for name, red in one["red"].items() if name in ATTACKS]
        write_detection(effort, "false_alarm", [{"attack": name, "red": red, "of": of} for name, red, of in of_attacks])
    elif write:
        write_detection(effort, "smallest", list(smallest(found)))
        write_detection(effort, "missed", list(missed(found)))
    return {**record, "rates": found}


def rates(rows: Sequence[Row]) -> list[Row]:
    """Return, by group, the number of rows, of red ones by search, and the mean figures."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[json.dumps(row["group"])].append(row)
    return [
        {
            **json.loads(group),
            "of": len(some),
            "images": round(fmean(row["images"] for row in some)),
            "red": {name: sum(name in row["red"] for row in some) for name in some[0]["tried"]},
            "figures": {name: fmean(row["figures"].get(name, nan) for row in some) for name in some[0]["figures"]},
        }
        for group, some in groups.items()
    ]


def smallest(found: Sequence[Row]) -> Iterator[Row]:
    """Yield the smallest leak that each attack finds in 80 % of the plants; between two strengths it is interpolated in the rate."""
    for size, kind in itertools.product(dict.fromkeys(one["size"] for one in found), PLANTS):
        levels = [one for one in found if (one["size"], one["plant"]) == (size, kind) and one["of"] >= _FEWEST]
        for attack, figure in PLANTS[kind].attacks.items() if levels else ():
            shares = [one["red"][attack] / one["of"] for one in levels]
            at = next((at for at, share in enumerate(shares) if share >= _FOUND), None)
            if at is not None and figure in levels[at]["figures"]:
                leaks = [one["figures"][figure] for one in levels]
                leak = np.interp(_FOUND, shares[at - 1 : at + 1], leaks[at - 1 : at + 1]) if at else leaks[0]
                of = {"images": levels[at]["images"], "figure": figure, "leak": round(float(leak), 3)}
                yield {"attack": attack, **of, "plants": min(one["of"] for one in levels)}


def missed(found: Sequence[Row]) -> Iterator[Row]:
    """Yield what each attack finds of the plants of any strength at most, where that is below 80 %."""
    for size, kind in itertools.product(dict.fromkeys(one["size"] for one in found), PLANTS):
        levels = [one for one in found if (one["size"], one["plant"]) == (size, kind) and one["of"] >= _FEWEST]
        for attack in PLANTS[kind].attacks if levels else ():
            best = max(levels, key=lambda one: one["red"][attack] / one["of"])
            if best["red"][attack] < _FOUND * best["of"]:
                of = {"images": best["images"], "plant": kind, "found": best["red"][attack], "of": best["of"]}
                yield {"attack": attack, **of}


def write_detection(effort: Effort, table: str, rows: Sequence[Row]) -> None:
    """Put rows into a table of the audit's `detection.toml`, in place of those of the same attack, effort, figure and images."""
    file = Path(audit.__file__).with_name("detection.toml")
    text, tables = read_values(file, AuditError)
    told = [{"attack": row["attack"], "effort": effort.value, **row} for row in rows]

    def place(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in ("attack", "effort", "figure", "plant", "images"))

    kept = {place(row): row for row in [*tables[table], *told]}
    tables[table] = sorted(kept.values(), key=lambda row: (*map(str, place(row)[:-1]), row.get("images", 0)))
    written = [line for line in text.splitlines() if line.startswith("#")]
    for name, some in tables.items():
        pairs = ([f"{key} = {json.dumps(value)}" for key, value in row.items()] for row in some)
        written += [f"{name} = [", *(f"  {{ {', '.join(row)} }}," for row in pairs), "]"]
    replace_durably(file, "\n".join(written) + "\n", READABLE)


def lines(found: Sequence[Row]) -> Iterator[str]:
    """Yield rates as a Markdown table; intervals are exact (Clopper-Pearson, 95 %)."""
    yield "| updates | search | red | interval | figures (mean) |\n|---|---|---|---|---|"
    for one in found:
        what = f"{one['plant']} {one['strength']:g}, {one['images']} images" if "plant" in one else "without a leak"
        figures = ", ".join(f"{name} {value:.3g}" for name, value in one["figures"].items())
        for name, count in one["red"].items():
            rate = proportion(count, one["of"])
            yield f"| {what} | {name} | {count} of {one['of']} | {rate.low:.0%} to {rate.high:.0%} | {figures} |"
