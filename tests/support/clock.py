"""A clock that only a test moves."""


class Clock:
    """Seconds since an arbitrary start."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
