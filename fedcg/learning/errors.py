"""Errors of the learning core.

LearningError
├── DataError            a folder, file or array that is not the data the spec describes
├── DefenceError         a data defence that these images, keys or settings do not allow
├── ExtensionError       an installed package's method, generator or split that can't be used
├── NetworkError         a network that cannot be built, or weights that do not fit it
├── ProgramError         a program of the user's own that can't be found, imported or called
├── PrivacyError         a mechanism that can't be had with this method, network or installation
└── UnknownMethodError   no file of that name in `fedcg/learning/methods/`, and no installed package with such a method

`fedcg.learning.method.DivergedError` (NaN or an exploding loss) belongs to the contract of a method and stands there.
"""

from fedcg.errors import BAD_INPUT, NOT_FOUND, FedcgError


class LearningError(FedcgError):
    """Base of what the learning core raises for bad input."""

    exit_code = BAD_INPUT


class DataError(LearningError):
    """A folder, file or array that is not the data the spec describes; the message names the file."""


class DefenceError(LearningError):
    """A data defence that these images, keys or settings do not allow; the message names the field to change."""


class ExtensionError(LearningError):
    """Something that an installed package adds and that can't be used; the message names it and the package's entry."""


class NetworkError(LearningError):
    """A network that cannot be built for this spec, or weights that do not fit it."""


class PrivacyError(LearningError):
    """A mechanism that can't be had with this method, network or installation; the message names the setting to change."""


class ProgramError(LearningError):
    """A program of the user's own that can't be found, imported or called; the message names it, and the place in its code."""


class UnknownMethodError(LearningError):
    """No method of that name; the message lists those there are."""

    exit_code = NOT_FOUND
