"""Test `flops_profiler` and `wall_clock_breakdown` with two stages, which the stock engine cannot do."""

import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import engines
from tests.distributed.harness import rank_pool

PLAN = [8, 9, 6]
ROWS, HIDDEN = 2, 16  # heads times their size
FLOPS = {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 2, "detailed": True}
RECOMPUTED = {"activation_checkpoint_interval": 1}
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def operations(engine: Any, recomputes: bool) -> dict[str, int]:
    """Count operations of a stage on one micro-batch, from the shapes of its weights and the causal pairs of tokens."""
    weights = {name: p.numel() for name, p in engine.module.named_parameters() if p.dim() == 2}
    matrices = sum(count for name, count in weights.items() if not name.startswith("0."))  # the embedding looks up
    decoders = sum("attention.out" in name for name in weights)
    products = 2 * ROWS * engines.LENGTH * matrices
    pairs = 2 * decoders * ROWS * HIDDEN * engines.LENGTH * (engines.LENGTH + 1) // 2
    # the loss leaves all products of the output matrix to the backward
    head = 2 * ROWS * engines.LENGTH * sum(count for name, count in weights.items() if name.startswith("6."))
    forward = products - head + 2 * pairs
    backward = {"inputs": products + 2 * head, "weights": products - head, "attention backward": 5 * pairs}
    return {"forward": forward, **backward, "again": forward if recomputes else 0}


@functools.cache
def plain_run(plan: tuple[int, ...], schedule: str, recomputes: bool) -> engines.Run:
    options: dict[str, Any] = {"module": RECOMPUTED} if recomputes else {}
    terapipe = engines.unchecked(slices=list(plan), schedule=schedule)
    return engines.run_training(engines.fp32_layers, terapipe, engines.batches(3), **options)


def job_flops(plan: list[int], schedule: str = "1f1b", **options: Any) -> dict[str, Any]:
    """Return the text printed in each step, and whether the profile has affected training."""
    terapipe = engines.unchecked(slices=plan, schedule=schedule)
    recomputes = "module" in options
    plain = plain_run(tuple(plan), schedule, recomputes)
    printed, run = [], engines.Run()
    with engines.engine_of(engines.fp32_layers(), terapipe, **options) as engine:
        for batch in engines.batches(3):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                step = engines.train(engine, [batch])
            engine.eval_batch(iter(batch))
            printed.append(text.getvalue())
            run.returned += step.returned
            run.parameters = step.parameters
        expected = operations(engine, recomputes)
    same = engines.error_of([run.returned, run.parameters], [plain.returned, plain.parameters])
    return {"printed": printed, "expected": expected, "same": same}


def value(shown: str) -> float:
    number, _, unit = shown.partition(" ")
    return float(number) * UNITS[unit]


def figure(text: str, name: str) -> float:
    """Return the figure of a line such as `forward: 12.5 K`."""
    found = re.search(rf"^  {name}: ([\d.]+ ?[KMG]?)$", text, re.MULTILINE)
    assert found, text
    return value(found[1])


CASES: dict[str, dict[str, Any]] = {
    "slices": {"plan": PLAN},
    "recomputed": {"plan": PLAN, "module": RECOMPUTED},
    "weight gradients apart": {"plan": PLAN, "schedule": "seq1f1b-zb"},
    "whole": {"plan": [engines.LENGTH]},
}


class TestFlops:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("name", CASES)
    def test_every_stage_prints_what_its_shapes_say(self, name: str) -> None:
        ranks = rank_pool(2).run(job_flops, **CASES[name], flops_profiler=FLOPS)
        for stage_id, rank in enumerate(ranks):
            before, text, after = rank["printed"]
            assert "flops_profiler" not in before + after, "in one step only"
            assert f"flops_profiler: step 1, stage {stage_id} of 2 (rank {stage_id}), operations" in text
            expected = rank["expected"]
            assert figure(text, "forward") == pytest.approx(expected["forward"], rel=1e-3)
            apart = expected["weights"] if name == "weight gradients apart" else 0
            backward = expected["inputs"] + expected["weights"] + expected["attention backward"] + expected["again"]
            assert figure(text, "backward") == pytest.approx(backward - apart, rel=1e-3)
            assert figure(text, "weight gradients apart") == pytest.approx(apart, rel=1e-3)
            by_layer = re.findall(r"^  forward of PipelineModule\.\d+: ([\d.]+ ?[KMG]?)$", text, re.MULTILINE)
            assert sum(map(value, by_layer)) == pytest.approx(expected["forward"], rel=1e-3), "the detailed profile"
            assert rank["same"] == 0.0
        assert ranks[0]["expected"] != ranks[1]["expected"]

    @pytest.mark.parametrize(("timed", "steps"), [(True, None), (False, 0)])
    def test_steps_per_print_need_not_be_set(self, timed: bool, steps: int | None) -> None:
        """Check that times are printed in each step if requested, and never for the operations alone."""
        measured = {"wall_clock_breakdown": True} if timed else {"flops_profiler": FLOPS}
        first, second = rank_pool(2).run(job_flops, plan=PLAN, steps_per_print=steps, **measured)
        assert first["same"] == second["same"] == 0.0
        assert {"fwd_microstep: " in text for text in first["printed"]} == {timed}

    def test_files_and_wall_clock_breakdown_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "profile.txt"
        flops = {**FLOPS, "module_depth": 1, "top_modules": 3, "detailed": False, "output_file": str(path)}
        ranks = rank_pool(2).run(
            job_flops, plan=PLAN, steps_per_print=1, flops_profiler=flops, wall_clock_breakdown=True
        )
        for stage_id, rank in enumerate(ranks):
            text = (path if stage_id == 0 else path.with_name("profile.txt.stage1")).read_text()
            assert figure(text, "forward") == pytest.approx(rank["expected"]["forward"], rel=1e-3)
            # on the last stage only the decoder layers have products: the loss has the products of the output matrix
            assert len(re.findall("forward of ", text)) == 3 - stage_id
            assert not re.search(r"PipelineModule\.\d+\.", text)
            assert rank["same"] == 0.0
            assert not any("flops_profiler: step" in text for text in rank["printed"])
        assert all("fwd_microstep: " in text for text in ranks[0]["printed"])
        assert sorted(each.name for each in path.parent.iterdir()) == ["profile.txt", "profile.txt.stage1"]


class OwnTracer:
    """Has no `listens`: it records always."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, step: int | None) -> None:
        self.seen.append(f"begin {step}")

    @contextlib.contextmanager
    def measure(self, action: Any) -> Iterator[None]:
        self.seen.append(str(action))
        yield

    def input_is_here(self) -> None: ...

    def write(self, step: int) -> None:
        self.seen.append(f"write {step}")


def seen_by_own_tracer() -> list[str]:
    with engines.engine_of(engines.fp32_layers(), engines.unchecked(slices=PLAN)) as engine:
        engine.tracer = tracer = OwnTracer()
        engines.train(engine, engines.batches(1))
        return tracer.seen


def test_a_tracer_of_ones_own_sees_each_computation() -> None:
    for seen in rank_pool(2).run(seen_by_own_tracer):
        assert (seen[0], seen[-1]) == ("begin 1", "write 1") and {"F0.0", "B1.2"} <= {*seen}, seen
