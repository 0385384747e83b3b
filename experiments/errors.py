"""Errors of the experiments; exit code 2 for sources and options, 1 for the others.

ExperimentError
├── SourceError    a data source that can't be used, or can't be partitioned as requested
├── OptionError    options that conflict, or a folder without a demo
├── ProcessError   a process of the demo exited early, or a step failed
└── RunError       a simulated run without a result
"""

from fedcg.errors import BAD_INPUT, FedcgError


class ExperimentError(FedcgError):
    """Base of all errors of the experiments."""


class SourceError(ExperimentError):
    """A data source that can't be used, or can't be partitioned as requested."""

    exit_code = BAD_INPUT


class OptionError(ExperimentError):
    """Options that conflict, or a folder without a demo."""

    exit_code = BAD_INPUT


class ProcessError(ExperimentError):
    """A process of the demo exited early, or a step failed."""


class RunError(ExperimentError):
    """A simulated run without a result: no client could train, or its workers kept dying."""
