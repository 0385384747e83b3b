"""Errors of the experiments; exit code 2 for sources and options, 1 for the others.

ExperimentError
├── SourceError    a data source that can't be used, or a partition that can't be made of it
├── OptionError    options that don't go together, or a folder that is no demo's
├── ProcessError   a process of the demo ended too early, or a step of it failed
└── RunError       a simulated run without a result
"""

from fedcg.errors import BAD_INPUT, FedcgError


class ExperimentError(FedcgError):
    """Base of everything the experiments raise."""


class SourceError(ExperimentError):
    """A data source that can't be used, or a partition that can't be made of it."""

    exit_code = BAD_INPUT


class OptionError(ExperimentError):
    """Options that don't go together, or a folder that is no demo's."""

    exit_code = BAD_INPUT


class ProcessError(ExperimentError):
    """A process of the demo ended too early, or a step of it failed."""


class RunError(ExperimentError):
    """A simulated run without a result: no client could train, or its workers kept dying."""
