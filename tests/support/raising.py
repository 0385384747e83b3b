"""A function that fails, to stand in for one that works."""

from collections.abc import Callable
from typing import NoReturn


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    """A function that takes whatever it is given and raises this error."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail
