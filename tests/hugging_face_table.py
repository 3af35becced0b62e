"""Print the table of families in docs/hugging_face.md, measured with the transformers that is installed.

    python -m tests.hugging_face_table --json older.json    # with transformers 4.57
    python -m tests.hugging_face_table --older older.json   # with the newest

Each family's tiny model trains in slices of 3, 5, 2 and 6 tokens in one process, and so does the model of transformers
on whole rows. What is compared is the loss and all gradients.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from tests import hugging_face_families
from tests.unit.models.hugging_face.sliced_model import errors, in_fp64, ways_of

DOCUMENT = Path(__file__).parents[1] / "docs" / "hugging_face.md"
_WAYS = {"fast": "`sliced_attention`", "slow": "cache"}


@dataclasses.dataclass(frozen=True)
class Row:
    """How the decoder layers of a family run, and the largest relative errors of a training in slices."""

    way: str
    exact: float  # with every computation in fp64
    as_it_computes: float | None  # in fp64 but for what its code makes fp32; None where its code cannot


def measured(family: str) -> Row:
    ways: list[str] = []
    with in_fp64():
        exact = errors(hugging_face_families.config_of(family), change=lambda pipeline: ways.extend(ways_of(pipeline)))
    inside = (
        None if family in hugging_face_families.NOT_IN_FP64 else max(errors(hugging_face_families.config_of(family)))
    )
    kinds = sorted({each.partition("+")[0] for each in ways})
    way = "both" if len(kinds) > 1 else _WAYS[kinds[0]]
    return Row(way + (", carried states" if any("states" in each for each in ways) else ""), max(exact), inside)


def table(new: Mapping[str, Row | None], old: Mapping[str, Row | None]) -> list[str]:
    """Return the lines of the table; None stands for a refused family."""
    titles = ["family (`model_type`)", "runs through", "error in fp64", "as it computes"]
    titles += ["with 4.57, through", "error in fp64", "as it computes"]
    rows = [[f"`{family}`", *_cells(new, family), *_cells(old, family)] for family in sorted({*new, *old})]
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def _cells(rows: Mapping[str, Row | None], family: str) -> list[str]:
    row = rows.get(family)
    if row is None:
        return ["refused" if family in rows else "-", "", ""]
    return [row.way, f"{row.exact:.0e}", "-" if row.as_it_computes is None else f"{row.as_it_computes:.0e}"]


def documented() -> dict[str, str]:
    """Return how each family runs with the installed transformers, as the document has it.

    5.23 has no column: it runs all as 5.24 does, but for the families that the document names.
    """
    lines = DOCUMENT.read_text().split("| family (`model_type`) |")[1].splitlines()[2:]
    cells = [[each.strip() for each in line.split("|")[1:]] for line in lines[: lines.index("")]]
    rows = {row[0].strip("`"): row[4 if hugging_face_families.IS_4 else 1] for row in cells}
    if hugging_face_families.IS_BEFORE_5_24 and not hugging_face_families.IS_4:
        rows |= {
            **dict.fromkeys(hugging_face_families.NEWER, "-"),
            **dict.fromkeys(hugging_face_families.BY_CACHE_BEFORE_5_24, "cache"),
        }
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--older", type=Path, help="figures of the older version, by --json")
    args = parser.parse_args(arguments)
    rows: dict[str, Row | None] = {family: measured(family) for family in hugging_face_families.CONFIGS}
    both = {**rows, **dict.fromkeys(hugging_face_families.REFUSED)}
    if args.json is not None:
        args.json.write_text(json.dumps({name: row and dataclasses.asdict(row) for name, row in both.items()}))
        return
    older = {} if args.older is None else json.loads(args.older.read_text())
    old = {name: row and Row(**row) for name, row in older.items() if row or name in hugging_face_families.CONFIGS}
    print("\n".join(table(rows, old)))


if __name__ == "__main__":
    main()
