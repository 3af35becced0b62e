"""AMP's measured strategies: ranks of the predicted times, and which strategies need too much memory."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest

from studies import amp
from studies.amp import Ranking, fit, measured_runs, needs, rank_correlation, rules
from studies.amp_model import AmpLayers, AmpModel, Constants, amp_cluster, amp_size, published, published_runs
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.parts import Setting, Span

PAGE = (Path(__file__).parents[3] / "docs" / "strategy.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return Ranking.of(*next(iter(rules(47).items())))


def test_correlations_are_those_of_ranks() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 sum(d^2) / (n (n^2 - 1)) without equal numbers: d = 0, 1, -1, 0, 0
    assert rank_correlation([1, 2, 3, 4, 5], [7, 9, 8, 11, 30]) == pytest.approx(1 - 6 * 2 / (5 * 24))
    # with equal ones: ranks 0.5 0.5 2 against 0 1 2, by hand 1.5 / sqrt(1.5 * 2)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.75**0.5)


def test_the_published_runs_are_whole() -> None:
    runs = published_runs()
    assert (len(runs), len(measured_runs())) == (52, 47)
    assert all(run.pipeline * run.data * run.tensor == 16 for run in runs)
    assert all(len(run.layer_cuts) == run.pipeline + 1 and run.layer_cuts[-1] == 30 for run in runs)
    predicted = [run.amp_predicted_s for run in runs]
    assert predicted == sorted(predicted)  # the order that the rules count in


def test_no_choice_of_five_looks_at_times() -> None:
    for chosen in rules(47).values():
        assert len(set(chosen)) == 5 and all(index in range(47) for index in chosen)
        steps = {after - before for before, after in pairwise(chosen)}
        assert max(steps) - min(steps) <= 1


def test_ranks_of_times_that_were_not_fitted(ranking: Ranking) -> None:
    assert ranking.correlation >= 0.9
    assert ranking.mean_error < 0.15
    assert 0.9 < ranking.amp_correlation < 0.95
    runs = measured_runs()
    everything = rank_correlation([run.amp_predicted_s for run in runs], [run.measured_s or 0.0 for run in runs])
    assert everything == pytest.approx(0.935, abs=5e-4)


@pytest.mark.full
def test_ranks_do_not_hang_on_the_five() -> None:
    assert all(Ranking.of(*rule).correlation >= 0.9 for rule in rules(47).items())


def test_the_fit_finds_the_constants_of_times_that_it_made() -> None:
    wanted = Constants(0.5, 0.8)
    runs = [measured_runs()[index] for index in rules(47)["every ninth from no. 5"]]
    made = [dataclasses.replace(run, measured_s=AmpModel(wanted).seconds(run)) for run in runs]
    found = fit(made)
    assert (found.device, found.network) == (pytest.approx(0.5, rel=1e-6), pytest.approx(0.8, rel=1e-6))


def test_what_did_not_run_needs_most_memory_or_has_a_stage_without_parameters() -> None:
    found = needs()
    failed = [need for need in found if need.run.measured_s is None]
    assert len(failed) == 5 and found[:5] == failed
    (empty,) = (need for need in failed if need.most_bytes is None)
    assert empty.run.layer_cuts[1:3] == (1, 2)  # embedding | transposition | ...
    ran = [need.most_bytes or 0 for need in found[5:]]
    assert max(ran) < min(need.most_bytes for need in failed if need.most_bytes) < published()["device"]["memory_bytes"]


def test_a_layer_keeps_what_unfused_attention_keeps() -> None:
    """By the count of Korthikanti et al. (2022), s b h (10 + 24 / t + 5 a s / (h t)), and the scores, 2 a s / t."""
    size, length, rows, degree = amp_size(), 1024, 4, 2
    layers = AmpLayers(amp_cluster(Constants()))
    setting, spans = Setting(degree, rows), [Span(0, 9), Span(9, 10), Span(10, 26)]
    part = layers.memory_of_spans(setting, spans)[1]
    scores = 7 * size.num_heads * length / (size.hidden_size * degree)
    counted = length * rows * size.hidden_size * (10 + 24 / degree + scores)
    statistics = 4 * rows * length * (4 + size.num_heads / degree)  # of two norms, and of each head
    sent = 2 * rows * length * size.hidden_size  # what it received is the input of the first norm, which the count has
    assert length * (part.slice_bytes_per_token + (part.whole_bytes_per_token or 0)) == pytest.approx(
        counted + statistics + sent, rel=1e-6
    )


def test_a_layer_runs_forward_twice_and_moves_scores() -> None:
    cluster, setting = amp_cluster(Constants(0.5, 0.5)), Setting(2, 4)
    ours = AmpLayers(cluster).layer_costs(setting, False)[1]
    plain = CountedLayers(amp_size(), cluster, "fp16").layer_costs(setting, False)[1]
    reachable = 0.5 * 320e9 * 0.75
    scores = 4 * 8 * 1024 * 1024  # rows, heads of a rank, tokens
    hidden = 4 * 1024 * 1024 * 2 * (9 + 12 / 2)
    forward_s = plain.forward_s(1024, 0) + (17 * scores + hidden) / reachable + 8 * 12e-6
    backward_s = plain.backward_s(1024, 0) + (23 * scores + 2 * hidden) / reachable + 16 * 12e-6
    assert ours.forward_s(1024, 0) == pytest.approx(2 * forward_s)
    assert ours.backward_s(1024, 0) == pytest.approx(backward_s)


def test_the_page_has_what_the_command_prints(ranking: Ranking) -> None:
    lines = f"{amp.ranking_table([ranking])}\n{amp.memory_table(needs()[:8])}".splitlines()
    assert all(line in PAGE.splitlines() for line in lines)


@pytest.mark.full
def test_the_command_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    amp.main(["--json"])
    result = json.loads(capsys.readouterr().out)
    assert len(result["rankings"]) == 10 and len(result["runs"]) == 52
    assert sum(run["predicted_s"] is None for run in result["runs"]) == 1
