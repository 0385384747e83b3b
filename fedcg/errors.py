"""The errors with which a command ends that can't do its work; `fedcg.cli` gives their exit codes to the shell.

FedcgError            1: failed while running
├── BadInputError     2: bad input; options that a command itself refuses
└── …                 each package's own errors, with the code that its `errors.py` states
"""

from __future__ import annotations

from typing import ClassVar

FAILED, BAD_INPUT = 1, 2


class FedcgError(Exception):
    """Base of every error whose message is meant for the person at the command line.

    Attributes:
        exit_code: of a command that ends with it.
    """

    exit_code: ClassVar[int] = FAILED


class BadInputError(FedcgError):
    """Options of a command that can't be used."""

    exit_code = BAD_INPUT
