"""The options that describe a schedule, for all commands that take one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from terapipe_ds.commands import CommandError
from terapipe_ds.commands.options import Group, Options, Text, option, switch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from terapipe_ds.schedule import Schedule

MAX_FORWARDS, MAX_STAGES = 1_000_000, 10_000
SOURCE = Group("source", "exactly one")
_SCHEDULE_HELP = (
    "gpipe, 1f1b, dapple, terapipe, seq1f1b, zb-h1, seq1f1b-zb, interleaved, seq1f1b-interleaved, zbv, chimera or"
    " chimera-seq"
)


def _read_options(texts: list[str]) -> dict[str, Any]:
    """Return what `--option NAME=VALUE`, once for each, says."""
    options: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in ("policy", "slots") or not value:
            raise CommandError(f"--option {text!r}: give policy=A or policy=B for dapple, slots=4,5,3 for zbv")
        if name in options:
            raise CommandError(f"--option {name} is given twice: give it once")
        numbers = value.split(",")
        options[name] = [int(n) for n in numbers] if all(n.isdecimal() and len(n) < 10 for n in numbers) else value
    return options


ScheduleDetails = Annotated[dict[str, Any], BeforeValidator(_read_options)]


def details_option(group: Group) -> Any:
    """Declare `--option`, whose value is of type `ScheduleDetails`."""
    words = "of the schedule: policy=A or policy=B for dapple, slots=4,5,3 for zbv"
    return group.option(words, "NAME=VALUE", {}, flags=("--option",), action="append")


class ScheduleOptions(Options):
    """A schedule by its name and counts, or from a file that says all of it."""

    schedule: Text | None = SOURCE.option(_SCHEDULE_HELP, "NAME")
    from_csv: Text | None = SOURCE.option("read a schedule: a row per stage, cells such as F0.3", "FILE")
    stages: int | None = option("pipeline stages", "K", ge=1, le=MAX_STAGES)
    micro_batches: int = option("micro-batches per step (default 1)", "M", default=1, ge=1, le=MAX_FORWARDS)
    chunks_per_stage: int = option("parts that each stage holds (default 1)", "V", default=1, ge=1)
    schedule_options: ScheduleDetails = details_option(Group())
    forward_only: bool = switch("the schedule of an evaluation")

    def load(self, path: str, *more: str) -> Schedule:
        """Return the schedule in a file; options that describe one too, and `more` of them, are refused."""
        from terapipe_ds.schedule import load

        describing = {*ScheduleOptions.model_fields, *more} - {"from_csv"}
        for name in self.given:
            if name in describing:
                text = "does not go with --from-csv: the file says it all, leave it out"
                raise CommandError(f"{self.name_of(name)} {text}")
        return load(path)

    def build(self, num_slices: int | Sequence[int]) -> Schedule:
        """Return the schedule of the options, with so many slices of each micro-batch, or one number for each."""
        from terapipe_ds.schedule import build

        if self.stages is None:
            raise CommandError("--stages is missing: give the number of pipeline stages")
        units = num_slices * self.micro_batches if isinstance(num_slices, int) else sum(num_slices)
        num_forwards = self.stages * units * self.chunks_per_stage
        if num_forwards > MAX_FORWARDS:
            raise CommandError(f"{num_forwards} forwards are too many: ask for at most {MAX_FORWARDS}")
        counts = self.stages, self.micro_batches, num_slices
        more = {"chunks_per_stage": self.chunks_per_stage, **self.schedule_options}
        return build(str(self.schedule), *counts, forward_only=self.forward_only, **more)
