"""AMP's 52 measured strategies of a GPT-2 on 16 T4, ranked by the planner's costs: `python -m studies.amp`.

Li et al., "AMP" (NeurIPS 2022, arXiv 2210.07297) ran every strategy with DeepSpeed. Two constants are fitted to five of
the 47 times, which share of their data sheets device and network reach; the other 42 are predicted. The five lie evenly
in the published order, which is that of AMP's predictions; other choices of five are beside them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from studies.amp_model import AmpModel, AmpRun, Constants, published, published_runs
from studies.dapple_model import Array
from studies.options import study_parser

FITTED = 5  # times
_STEP = 9
_LOG_STEP, _ROUNDS = 0.02, 6
_SHARES = 0.1, 1.3  # of data sheet figures


def rank_correlation(first: Sequence[float] | Array, second: Sequence[float] | Array) -> float:
    """Return Spearman's correlation of the ranks; equal numbers get the mean of their ranks."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float] | Array) -> Array:
    given = np.asarray(values, float)
    below = (given[None, :] < given[:, None]).sum(axis=1)
    equal = (given[None, :] == given[:, None]).sum(axis=1)
    ranks: Array = below + (equal - 1) / 2
    return ranks


def measured_runs() -> list[AmpRun]:
    """Return the runs that have a time, in the published order."""
    return [run for run in published_runs() if run.measured_s is not None]


def rules(count: int) -> dict[str, list[int]]:
    """Return the choices of five by name, first the one that counts. No choice depends on a measured time."""
    chosen = {"evenly, no. 1 to the last": [round(i * (count - 1) / (FITTED - 1)) for i in range(FITTED)]}
    for start in range(_STEP):
        chosen[f"every ninth from no. {start + 1}"] = list(range(start, count, _STEP))[:FITTED]
    return chosen


def fit(runs: Sequence[AmpRun]) -> Constants:
    """Return the constants with the least squares of relative errors, by Gauss and Newton on logarithms."""
    wanted = np.log([run.measured_s or np.nan for run in runs])

    def errors(point: Array) -> Array:
        model = AmpModel(Constants(*np.exp(point).tolist()))
        found: Array = np.log([model.seconds(run) for run in runs]) - wanted
        return found

    point = np.log([0.6, 0.6])
    for _ in range(_ROUNDS):
        here = errors(point)
        slopes = np.stack([(errors(point + step) - here) / _LOG_STEP for step in _LOG_STEP * np.eye(2)], axis=1)
        point = np.clip(point - np.linalg.lstsq(slopes, here, rcond=None)[0], *np.log(_SHARES))
    return Constants(*np.exp(point).tolist())


@dataclass(frozen=True)
class Ranking:
    """Hold the result of one choice of five: ours and AMP's correlation with the 42 other times."""

    rule: str
    constants: Constants
    correlation: float
    amp_correlation: float
    mean_error: float  # over the 42, absolute

    @classmethod
    def of(cls, rule: str, chosen: Sequence[int]) -> Ranking:
        """Fit to the chosen runs and rank the others."""
        runs = measured_runs()
        constants = fit([runs[index] for index in chosen])
        others = [run for index, run in enumerate(runs) if index not in set(chosen)]
        model = AmpModel(constants)
        ours = np.array([model.seconds(run) for run in others])
        theirs = [run.amp_predicted_s for run in others]
        times = np.array([run.measured_s for run in others], float)
        error = float(np.abs(ours / times - 1).mean())
        return cls(rule, constants, rank_correlation(ours, times), rank_correlation(theirs, times), error)


@dataclass(frozen=True)
class Need:
    """Hold the most bytes of any stage of a run; None if a stage has no parameters, so that it cannot run."""

    run: AmpRun
    most_bytes: int | None


def needs() -> list[Need]:
    """Return the memory need of every run: first the runs that cannot run, then from the largest need down."""
    model = AmpModel(Constants())
    found = [Need(run, model.most_bytes(run) if run.bounds else None) for run in published_runs()]
    return sorted(found, key=lambda need: float("inf") if need.most_bytes is None else need.most_bytes, reverse=True)


def ranking_table(rankings: Sequence[Ranking]) -> str:
    """Return a line per choice of five."""
    lines = ["| fitted to | device | network | correlation | AMP's | mean error |", "|---|---|---|---|---|---|"]
    for row in rankings:
        shares = f"{row.constants.device:.2f} | {row.constants.network:.2f}"
        lines.append(
            f"| {row.rule} | {shares} | {row.correlation:.3f} | {row.amp_correlation:.3f} | {row.mean_error:.1%} |"
        )
    return "\n".join(lines)


def memory_table(found: Sequence[Need]) -> str:
    """Return a line per run."""
    lines = ["| stages | replicas | tensor ranks | micro-batch | needs | measured |", "|---|---|---|---|---|---|"]
    for need in found:
        run = need.run
        size = "a stage without parameters" if need.most_bytes is None else f"{need.most_bytes / 1e9:.1f} GB"
        time = "did not run" if run.measured_s is None else f"{run.measured_s:.2f} s"
        lines.append(f"| {run.pipeline} | {run.data} | {run.tensor} | {run.micro_batch} | {size} | {time} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = study_parser("amp", __doc__)
    parser.add_argument("--needs", type=int, default=8, metavar="N", help="lines of memory (default: %(default)s)")
    options = parser.parse_args(arguments)
    rankings = [Ranking.of(*rule) for rule in rules(len(measured_runs())).items()]
    found = needs()
    if options.json:
        model = AmpModel(rankings[0].constants)
        rows = [
            asdict(need.run)
            | {"most_bytes": need.most_bytes, "predicted_s": model.seconds(need.run) if need.run.bounds else None}
            for need in found
        ]
        print(json.dumps({"rankings": [asdict(row) for row in rankings], "runs": rows}, indent=1))
        return
    runs = measured_runs()
    all_runs = rank_correlation([run.amp_predicted_s for run in runs], [run.measured_s or 0.0 for run in runs])
    print(f"{ranking_table(rankings)}\n\nAMP's correlation with all {len(runs)} times: {all_runs:.3f}\n")
    memory_bytes = published()["device"]["memory_bytes"]
    print(f"{memory_table(found[: options.needs])}\n\nA T4 has {memory_bytes / 1e9:.1f} GB, of which CUDA has a part.")


if __name__ == "__main__":
    main()
