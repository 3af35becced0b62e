"""AMP's configurations: what is predicted for them, from five fitted times, and which are said not to fit."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import pytest

from studies import amp
from terapipe_ds.planner.layers.parts import Setting, Span


@functools.cache
def answer() -> dict[str, Any]:
    return amp.report()


def test_what_is_published() -> None:
    """47 runs have a time, five did not run; a cut of 30 pipeline layers is one of 26 of the planner's."""
    size, batch, runs = amp.published()
    assert (len(runs), sum(run.measured_s is None for run in runs), batch) == (52, 5, 32)
    for run in runs:
        assert run.tensor * run.data * run.pipeline == 16
        bounds = run.bounds(size.num_layers)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, 26, run.pipeline + 1)
        assert list(bounds) == sorted(bounds)
    (two,) = {run.bounds(24) for run in runs if run.layer_cuts == (0, 14, 30)}
    assert two == (0, 12, 26)  # cast, embedding, transpose and eleven decoder layers; thirteen, norm and head


def test_ranks_are_as_measured() -> None:
    found = answer()
    assert sum(run["is_fitted"] for run in found["runs"]) == amp.FITTED
    assert found["spearman"] >= 0.9
    assert found["mean_error"] < 0.15
    assert found["spearman_of_amp"] == pytest.approx(0.930, abs=5e-4)
    others = [run for run in found["runs"] if run["measured_s"] is not None and not run["is_fitted"]]
    assert len(others) == 42
    ranks = [
        [sorted(run[name] for run in others).index(run[name]) for run in others]
        for name in ("predicted_s", "measured_s")
    ]
    assert np.corrcoef(*ranks)[0, 1] == pytest.approx(found["spearman"], abs=5e-3)  # but for ties


def test_all_that_did_not_run_is_said_not_to_fit() -> None:
    runs = answer()["runs"]
    assert not [run for run in runs if run["measured_s"] is None and run["fits"]]
    wrong = [run for run in runs if run["measured_s"] is not None and not run["fits"]]
    assert len(wrong) == 2  # the page names them


def test_the_fit_is_the_least_error_around_it() -> None:
    _, _, runs = amp.published()
    ran = [run for run in runs if run.measured_s is not None]
    found = answer()

    def error(device: float, network: float) -> float:
        cluster = amp.cluster_of(device, network)
        chosen = [ran[index] for index in (4, 14, 23, 32, 42)]
        return sum(math.log(amp.predict(run, cluster)[0] / (run.measured_s or math.nan)) ** 2 for run in chosen)

    at = (found["device"], found["network"])
    assert amp.middles(len(ran)) == [4, 14, 23, 32, 42]
    assert all(error(*at) <= error(at[0] * a, at[1] * b) for a, b in ((1.2, 1), (0.8, 1), (1, 1.2), (1, 0.8)))


def test_scores_are_kept_and_cost_as_megatron_writes_them() -> None:
    """By hand: 5 a s^2 b bytes per layer; 32 bytes of traffic per score and sequence, forward and backward."""
    size, _, _ = amp.published()
    cluster = amp.cluster_of(1.0, 1.0)
    layers, plain = (kind(size, cluster, "fp16") for kind in (amp.MegatronLayers, amp.CountedLayers))
    setting = Setting(tensor=2, micro_batch=3)
    spans = [Span(0, 5), Span(5, 26)]
    for one, other, decoders in zip(
        layers.memory_of_spans(setting, spans), plain.memory_of_spans(setting, spans), (4, 20), strict=True
    ):
        more = (one.slice_bytes_per_token - other.slice_bytes_per_token) * 1024
        assert more == pytest.approx(decoders * 5 * 16 / 2 * 1024**2 * 3)
    layer = layers.layer_costs(setting, False)[1]
    assert layer._attention_s(1024, 0) + layer._attention_s(1024, 0, backward=True) > 32 * 8 * 3 * 1024**2 / 240e9


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp, "report", answer)
    monkeypatch.setattr("sys.argv", ["amp", "--json"])
    amp.main()
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 52
    monkeypatch.setattr("sys.argv", ["amp"])
    amp.main()
    assert capsys.readouterr().out.count("\n| ") == 53
