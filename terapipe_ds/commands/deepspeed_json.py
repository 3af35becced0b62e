"""The keys of a DeepSpeed config that commands read, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from terapipe_ds.commands import DTYPE_NAMES, CommandError
from terapipe_ds.commands.options import refusal
from terapipe_ds.messages import show_value

_Count = Annotated[int | None, Field(ge=1), BeforeValidator(lambda value: None if value == "auto" else value)]


class _Keys(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Section(_Keys):
    """What commands read of the sections `bf16`, `fp16`, `zero_optimization` and `pipeline`."""

    enabled: Annotated[bool, BeforeValidator(lambda value: value is True)] = False
    stage: Annotated[int | None, Field(ge=0), BeforeValidator(lambda value: None if value == "auto" else value)] = None
    activation_checkpoint_interval: Annotated[int, Field(ge=0)] = 0


_OneSection = Annotated[_Section, BeforeValidator(lambda value: value or {})]


class DeepSpeedJson(_Keys):
    """What is None is not in the file, or "auto". DeepSpeed checks all other keys itself."""

    train_micro_batch_size_per_gpu: _Count = None
    gradient_accumulation_steps: _Count = None
    zero_optimization: _OneSection = _Section()
    bf16: _OneSection = _Section()
    fp16: _OneSection = _Section()
    pipeline: _OneSection = _Section()

    @classmethod
    def of(cls, ds_config: dict[str, Any]) -> Self:
        """Read the content of the file of `--config`.

        Raises:
            CommandError: the first key with a value that cannot be.
        """
        try:
            return cls.model_validate(ds_config)
        except ValidationError as error:
            raise refusal(error, lambda path, value: f"{'.'.join(path)} = {show_value(value)} in --config") from None

    @property
    def precision(self) -> Literal["bf16", "fp16"] | None:
        """The section that is switched on."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else None

    @property
    def dtype(self) -> str:
        """What the config trains in, as torch calls it."""
        return DTYPE_NAMES[self.precision or "fp32"]

    def number(self, key: Literal["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]) -> int:
        """Return a number that what runs here has to know: 1 where the config has none.

        Raises:
            CommandError: "auto", which no launcher fills in here.
        """
        value = getattr(self, key)
        if value is None and key in self.model_fields_set:
            raise CommandError(f"{key} = 'auto' or null in --config: give an integer >= 1")
        return 1 if value is None else int(value)
