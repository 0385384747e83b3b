"""The form that writes a plan: its fields, the text of the plan after changes of fields, and the page."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

import tomllib
from fastapi import Response

from coordinator.operations.create_federation import networks_here
from coordinator.page.views import View
from fedcg.config_file import plain_value
from fedcg.learning.method_choice import method_choice, recommended
from fedcg.learning.project import CHOSEN, plan_text
from fedcg.learning.spec import NetworkChoice, RoundPolicy

_TEXTS, _NUMBERS = ("federation", "input.mode", "method", "network.split"), ("input.mean", "input.std")
FIELDS = (*_TEXTS, "classes", "input.height", "input.width", *_NUMBERS, *RoundPolicy.model_fields)
_PROBLEM = re.compile(rf"(?:line \d+: )?({'|'.join(map(re.escape, FIELDS))})(?:\.\d+)?(?:: | = .*?: )(.*)", re.DOTALL)


def edited(text: str, shown: str, given: Mapping[str, str]) -> str:
    """The text of a plan with the changed fields of its form. It stays as it is if none changed, or if it is not TOML.

    Args:
        text: as sent, perhaps edited by hand.
        shown: as it was when the form was shown: fields that differ from it were changed.
        given: the form's fields.
    """
    plan, before = _parsed(text), _parsed(shown)
    if plan is None or before is None:
        return text
    was, values = _fields_of(before), {name: _read(name, given[name]) for name in FIELDS if name in given}
    changed = {name: value for name, value in values.items() if value != was[name]}
    if not changed:
        return text
    plan |= {table: _table(plan, table) for table in ("input", "network")}
    if "method" in changed:
        plan = plan | {"params": {}} | method_choice()["suited"].get(changed["method"], {})
    if "network.split" in changed:
        kept = {name: value for name, value in plan["network"].items() if name in CHOSEN}
        plan["network"] = kept | networks_here().get(str(changed["network.split"]), {})
    if "input.mode" in changed and not changed.keys() & set(_NUMBERS):
        changed |= dict.fromkeys(_NUMBERS, [0.5] * len(str(changed["input.mode"])))
    for name, value in changed.items():
        table, _, key = name.rpartition(".")
        (plan[table] if table else plan)[key] = value
    return plan_text({name: value for name, value in plan.items() if value is not None})


def plan_text_of(fields: Mapping[str, str]) -> str:
    """The plan that a form means: its text with the changed fields."""
    method = {"method": fields["method"] or recommended(fields)[1]} if "method" in fields else {}
    return edited(fields.get("plan", ""), fields.get("shown", ""), {**fields, **method})


def plan_page(
    view: View, text: str, given: dict[str, str], problems: Iterable[str] = (), status: int = 200
) -> Response:
    """The form with a plan, and the problems of the plan at its fields."""
    plan, wrong, choice = _parsed(text) or {}, dict[str, list[str]](), method_choice()
    for problem in problems:
        parts = _PROBLEM.fullmatch(problem)
        wrong.setdefault(parts[1] if parts else "", []).append(parts[2] if parts else problem)
    fields = {name: _text(name, value) for name, value in _fields_of(plan).items()} if plan else given
    answers = {name: given.get(name, usual) for name, (_, usual) in choice["questions"].items()}
    asked, method = recommended(answers)
    sized = {name: plan[name] for name in ("classes", "input", "network", "method", "codec", "sealed") if name in plan}
    query = json.dumps({"federation": "f", "rounds": 1, **sized}, default=str)
    values: dict[str, Any] = {"plan": text, "values": dict.fromkeys(FIELDS, "") | fields, "problems": wrong}
    values |= {"answers": answers, "questions": {name: choice["questions"][name][0] for name in asked}}
    values |= {"recommended": method, "methods": choice["when"], "start": given.get("start", "" if given else "yes")}
    values |= {"continued_from": given.get("continued_from", "")}
    values |= {"networks": dict.fromkeys([*networks_here(), *filter(None, [values["values"]["network.split"]])])}
    values |= {"policy": RoundPolicy.model_json_schema()["properties"], "sizing": urlencode({"plan": query})}
    return view.render("new_federation.html", status=status, **values)


def _parsed(text: str) -> dict[str, Any] | None:
    """The values of a plan; None if it is not TOML."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _fields_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `FIELDS` in a plan; None for those without a value and default."""
    found = {**RoundPolicy(rounds=1).model_dump(), "network.split": NetworkChoice().split, "rounds": None, **plan}
    for table in ("input", "network"):
        found |= {f"{table}.{name}": value for name, value in _table(plan, table).items()}
    return {name: found.get(name) for name in FIELDS}


def _table(plan: Mapping[str, Any], name: str) -> dict[str, Any]:
    return dict(plan[name]) if isinstance(plan.get(name), dict) else {}


def _read(name: str, text: str) -> Any:
    if name == "classes":
        return [line.strip() for line in text.splitlines() if line.strip()]
    if name in _NUMBERS:
        return [plain_value(word) for word in text.replace(",", " ").split()]
    return text if name in _TEXTS else plain_value(text)


def _text(name: str, value: object) -> str:
    if isinstance(value, list):
        return ("\n" if name == "classes" else ", ").join(map(str, value))
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, default=str).removesuffix(".0")
