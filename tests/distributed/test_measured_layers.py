"""Test sums over measured layers: over the parts measured with them, and over another cut's parts, measured apart."""

import json
import statistics
import time
from pathlib import Path

import pytest
import torch

from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import Profile
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from tests.distributed.engines import batches, engine_of, gpt_layers, section, train
from tests.distributed.harness import rank_pool

LENGTH = 256
LAYERS = {"dtype": "float32", "hidden_size": 128, "ffn_size": 512, "num_layers": 6, "max_sequence_length": LENGTH}
CUTS = [0, 7, 9], [0, 3, 9]
WITHIN = 0.25  # of the measured time, by the median of all slices: machines are noisy


def job_measure(folder: str, partition: list[int]) -> None:
    torch.set_num_threads(1)
    planned = section(slices="auto", granularity_tokens=64, planner={"cache_dir": folder}, partition=partition)
    with engine_of(gpt_layers(**LAYERS), planned) as engine:
        engine.slice_clock = time.process_time  # other programs may have the cores
        train(engine, batches(1, length=LENGTH))


def measured(folder: Path, partition: list[int]) -> Profile:
    rank_pool(2).run(job_measure, folder=str(folder), partition=partition)
    (file,) = folder.glob("profile-*.json")
    return Profile.load(file)


def ratios(told_by: Profile, of: Profile) -> list[float]:
    """Return sums of one profile's layers over the parts of another, slice by slice, forward and backward."""
    assert of.layers is not None
    parts = MeasuredParts.of_profile(told_by).cut(2, of.layers.bounds)
    assert parts is not None
    found = []
    for costs, part in zip(parts, of.parts, strict=True):
        for sample in part.samples:
            found.append(costs.forward_s(sample.tokens, sample.prefix) / sample.forward_s)
            found.append(costs.backward_s(sample.tokens, sample.prefix) / sample.backward_s)
    return found


@pytest.mark.alone
def test_a_cut_that_was_not_measured_is_predicted(tmp_path: Path) -> None:
    """The first cut has seven and two layers on its stages, the second three and six."""
    first, second = (measured(tmp_path / str(index), cut) for index, cut in enumerate(CUTS))
    for profile in (first, second):
        assert abs(statistics.median(ratios(profile, profile)) - 1) < WITHIN
    found = ratios(first, second)
    assert statistics.median(abs(ratio - 1) for ratio in found) < WITHIN, json.dumps(found)
    # the parts of the first cut, in place of the second's, would be far off
    unlike = [
        abs(model.forward_s(sample.tokens, sample.prefix) / sample.forward_s - 1)
        for model, part in zip(CostModel.from_profile(first), second.parts, strict=True)
        for sample in part.samples
    ]
    assert statistics.median(unlike) > WITHIN
