"""The base of plain values that processes and state machines pass to each other."""

import dataclasses
from typing import Any, ClassVar

from typing_extensions import dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Value:
    """A plain value: every subclass is a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        """Make the subclass a frozen dataclass."""
        dataclasses.dataclass(frozen=True)(cls)
