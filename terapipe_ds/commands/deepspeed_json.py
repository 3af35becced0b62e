"""The keys of a DeepSpeed config that commands read, checked; DeepSpeed checks all others itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from terapipe_ds.commands import DTYPE_NAMES, CommandError
from terapipe_ds.messages import show_value


@dataclasses.dataclass(frozen=True)
class DeepSpeedJson:
    """The content of the file of `--config`. A key `a.b` is key `b` of the object `a`.

    Raises:
        CommandError: from all methods, where a key has a value that cannot be.
    """

    content: dict[str, Any]

    def number(self, key: str, least: int = 1) -> int | None:
        """Return an integer; None where the config has none, or "auto"."""
        value = self._value(key)
        if value in (None, "auto"):
            return None
        if type(value) is not int or value < least:
            raise CommandError(f"{key} = {show_value(value)} in --config: give an integer >= {least}")
        return value

    def fixed_number(self, key: str, least: int = 1) -> int:
        """Return an integer that nothing fills in here: "auto" is refused. `least` where the config has none."""
        if self._value(key) == "auto":
            raise CommandError(f"{key} = 'auto' in --config: give an integer >= {least}")
        number = self.number(key, least)
        return least if number is None else number

    @property
    def precision(self) -> str | None:
        """The section that is switched on, "bf16" or "fp16"."""
        return next((name for name in ("bf16", "fp16") if self._value(f"{name}.enabled") is True), None)

    @property
    def dtype(self) -> str:
        """What the config trains in, as torch calls it."""
        return DTYPE_NAMES[self.precision or "fp32"]

    def _value(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        content = (self.content.get(section) or {}) if section else self.content
        if not isinstance(content, dict):
            raise CommandError(f"{section} = {show_value(content)} in --config: give an object")
        return content.get(name)
