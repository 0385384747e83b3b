"""Errors of the learning core.

LearningError
├── DataError            a folder, file or array that does not match the spec
├── DefenceError         a data defence that is incompatible with the images, keys or settings
├── ExtensionError       an unusable method, generator or split of an installed package
├── NetworkError         a network that cannot be built, or weights that do not fit it
├── ProgramError         a user's program that can't be found, imported or called
├── PrivacyError         a mechanism that is unavailable with this method, network or installation
└── UnknownMethodError   no file of that name in `fedcg/learning/methods/`, and no installed package with such a method

`fedcg.learning.method.DivergedError` (NaN or an exploding loss) belongs to the contract of a method and is defined there.
"""

from fedcg.errors import BAD_INPUT, NOT_FOUND, FedcgError


class LearningError(FedcgError):
    """Base of the learning core's errors for bad input."""

    exit_code = BAD_INPUT


class DataError(LearningError):
    """A folder, file or array that does not match the spec. The message names the file."""


class DefenceError(LearningError):
    """A data defence that is incompatible with the images, keys or settings. The message names the field to change."""


class ExtensionError(LearningError):
    """An unusable extension of an installed package. The message names it and the package's entry point."""


class NetworkError(LearningError):
    """A network that cannot be built for this spec, or weights that do not fit it."""


class PrivacyError(LearningError):
    """A mechanism that is unavailable with this method, network or installation. The message names the setting to change."""


class ProgramError(LearningError):
    """A user's program that can't be found, imported or called. The message names it and the place in its code."""


class UnknownMethodError(LearningError):
    """No method of that name. The message lists the available ones."""

    exit_code = NOT_FOUND
