"""A function that fails, to replace one that works."""

from collections.abc import Callable
from typing import NoReturn


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    """Return a function that accepts any arguments and raises this error."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail
