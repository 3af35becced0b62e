"""``flops_profiler`` and ``wall_clock_breakdown`` with two stages, which the stock engine cannot do."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engines import LENGTH, Run, batches, engine_of, error_of, gpt_layers, section, train
from tests.distributed.harness import rank_pool

PLAN = [8, 9, 6]
ROWS = 2
fp32_layers = functools.partial(gpt_layers, "float32")
FLOPS = {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 2, "detailed": True}
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def products(engine: Any, plan: list[int]) -> int:
    """Multiply-adds of a stage's forward on one micro-batch, from the shapes of its weights."""
    tokens = ROWS * LENGTH
    weights = {name: p.numel() for name, p in engine.module.named_parameters() if p.dim() == 2}
    matrices = sum(count for name, count in weights.items() if not name.startswith("0."))  # the embedding looks up
    num_decoders = sum("attention.out" in name for name in weights)
    stops = [sum(plan[: index + 1]) for index in range(len(plan))]
    pairs = sum(length * stop for length, stop in zip(plan, stops, strict=True))
    hidden_size = 16  # heads times their size
    return tokens * matrices + num_decoders * 2 * ROWS * hidden_size * pairs


def job_flops(plan: list[int], stages: int = 2, **options: Any) -> dict[str, Any]:
    """What was printed in each step, and whether the profile has left a trace on training."""
    with engine_of(fp32_layers(), section(slices=plan, schedule="1f1b"), stages=stages) as engine:
        plain = train(engine, batches(3))
    printed, run = [], Run()
    with engine_of(fp32_layers(), section(slices=plan, schedule="1f1b"), stages=stages, **options) as engine:
        for batch in batches(3):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                step = train(engine, [batch])
            engine.eval_batch(iter(batch))
            printed.append(text.getvalue())
            run.returned += step.returned
            run.parameters = step.parameters
        expected = products(engine, plan)
        left = [name for m in engine.module.modules() for name in vars(m) if re.fullmatch(r"__\w+__", name)]
    return {
        "printed": printed,
        "products": expected,
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "same": error_of(run.returned, plain.returned) + error_of(run.parameters, plain.parameters),
        "left": left,
    }


def figure(text: str, name: str) -> float:
    """The first figure of a line such as ``fwd MACs per GPU:   12.5 KMACs``."""
    found = re.search(rf"^{name}:\s+([\d.]+) ?([KMG]?)", text, re.MULTILINE)
    assert found, text
    return float(found[1]) * UNITS[found[2]]


class TestFlops:
    @pytest.mark.parametrize("plan", [PLAN, [LENGTH]], ids=["slices", "whole"])
    def test_every_stage_prints_its_own(self, plan: list[int]) -> None:
        ranks = rank_pool(2).run(job_flops, plan=plan, flops_profiler=FLOPS)
        for stage_id, rank in enumerate(ranks):
            before, text, after = rank["printed"]
            assert "Profiler" not in before + after, "in one step only"
            assert text.count("DeepSpeed Flops Profiler") == 1
            assert f"stage {stage_id} of 2 (rank {stage_id}), the forward of one micro-batch" in text
            assert figure(text, "params per GPU") == pytest.approx(rank["parameters"], rel=5e-3)
            macs = figure(text, "fwd MACs per GPU")
            assert macs == pytest.approx(rank["products"], rel=5e-3)
            assert 2 * macs <= figure(text, "fwd flops per GPU") <= 2.2 * macs, "activations and such are few"
            assert "DecoderLayer" in text and "CausalSelfAttention" in text, "the detailed profile"
            latency = re.search(r"^fwd latency:\s+([\d.]+) (s|ms|us)", text, re.MULTILINE)
            assert latency and float(latency[1]) * {"s": 1, "ms": 1e-3, "us": 1e-6}[latency[2]] < 60
            assert (rank["same"], rank["left"]) == (0.0, [])
        assert ranks[0]["products"] != ranks[1]["products"]

    def test_files_and_wall_clock_breakdown_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "profile.txt"
        options = {"flops_profiler": {**FLOPS, "output_file": str(path)}, "wall_clock_breakdown": True}
        ranks = rank_pool(2).run(job_flops, plan=PLAN, steps_per_print=1, **options)
        for stage_id, rank in enumerate(ranks):
            text = (path if stage_id == 0 else path.with_name("profile.txt.stage1")).read_text()
            assert figure(text, "fwd MACs per GPU") == pytest.approx(rank["products"], rel=5e-3)
            assert rank["same"] == 0.0
            assert not any("Flops" in text for text in rank["printed"])
        for text in ranks[0]["printed"]:
            micro = re.search(r"fwd_microstep: ([\d.]+) \| bwd_microstep: ([\d.]+)", text)
            assert micro and min(map(float, micro.groups())) > 0
        assert sorted(each.name for each in path.parent.iterdir()) == ["profile.txt", "profile.txt.stage1"]
