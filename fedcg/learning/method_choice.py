"""Which method suits a federation: reads `method_choice.toml`, which has a line for each method and the questions that lead to one."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedcg.config_file import read_values
from fedcg.errors import FedcgError


@cache
def method_choice() -> dict[str, dict[str, Any]]:
    """The content of `method_choice.toml`, read once: `when`, `questions`, `steps` and `suited`."""
    return read_values(Path(__file__).with_suffix(".toml"), FedcgError)[1]


def recommended(answers: Mapping[str, str]) -> tuple[list[str], str]:
    """The questions on the way to a method, and that method.

    Args:
        answers: yes or no by question; the others have their usual answers.
    """
    (questions, steps), asked, at = (method_choice()[name] for name in ("questions", "steps")), [], "q1"
    while at in steps:
        question, if_yes, if_no = steps[at]
        asked.append(question)
        at = if_yes if answers.get(question, questions[question][1]) == "yes" else if_no
    return list(dict.fromkeys(asked)), at
