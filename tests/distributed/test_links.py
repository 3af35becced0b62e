"""Test links of real stages: how many messages are on their way, and their contents."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.costs.profile import Profile
from terapipe_ds.runtime.links import choose_formats as formats
from terapipe_ds.runtime.links.channel import SendChannel
from tests.distributed import engines
from tests.distributed.harness import rank_pool


def job_far_ahead(schedule: str, slices: int, count: int) -> tuple[dict[str, float], list[int], int]:
    """Train `count` micro-batches in slices; return the errors, and the outstanding messages when the budget was spent.

    With gpipe stage 0 receives nothing before it has sent all activations, however fast stage 1 is.
    """
    seen: list[int] = []
    keep = SendChannel.keep_at_most

    def watched(self: SendChannel, count: int) -> None:
        seen.append(self.num_outstanding)
        keep(self, count)
        assert self.num_outstanding <= count

    with (
        mock.patch.object(SendChannel, "keep_at_most", watched),
        engines.engine_of(
            engines.gpt_layers(), engines.unchecked(schedule=schedule, slices=slices), gradient_accumulation_steps=count
        ) as engine,
    ):
        errors = engines.differences(engines.train(engine, engines.batches(2, count)), engines.stock_run(2, count))
        return errors, seen, engine._stage.links.outstanding_sends


def test_a_fast_stage_waits_where_its_budget_is_spent() -> None:
    found = rank_pool(2).run(job_far_ahead, schedule="gpipe", slices=23, count=2)
    assert not engines.violations([errors for errors, _, _ in found])
    assert [budget for _, _, budget in found] == [8, 8]
    _, seen, _ = found[0]
    assert seen.count(9) > 20, "of 92 activations all but the first ones of a step had to wait"
    assert max(max(seen) for _, seen, _ in found) == 9


def test_a_message_that_comes_frees_those_that_its_sender_has_consumed() -> None:
    """With one F and one B in turns an answer comes for each message, long before the budget is spent."""
    found = rank_pool(2).run(job_far_ahead, schedule="seq1f1b", slices=2, count=8)
    assert not engines.violations([errors for errors, _, _ in found])
    assert max(max(seen) for _, seen, _ in found) < 8


class Rounded(torch.autograd.Function):
    """Round 16 numbers of a token, which are one tile, as a link does, by torch's own casts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: str | None, backward: str | None) -> torch.Tensor:
        ctx.backward_format = backward
        if forward is None:
            return x.clone()
        if forward == "bf16":
            return x.bfloat16().to(x.dtype)
        largest = {"fp8": 448.0, "int8": 127.0}[forward]
        scale = x.float().abs().amax(-1, keepdim=True) / largest
        scaled = x.float() / scale
        rounded = scaled.round() if forward == "int8" else scaled.to(torch.float8_e4m3fn).float()
        return (rounded * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.bfloat16().to(grad.dtype) if ctx.backward_format == "bf16" else grad, None, None


def stock_with(forward: str | None, backward: str | None, cuts: int) -> Any:
    """Train with the stock engine on one stage, and round at the places of this number of links between the layers."""
    bounds = engines.pipeline_module(engines.gpt_layers(), stages=1 + cuts).parts[1:-1] if cuts == 1 else ()
    with engines.engine_of(engines.gpt_layers(), None, stages=1) as engine:
        for bound in bounds:
            layer = engine.module.forward_funcs[bound]
            layer.register_forward_pre_hook(lambda _, args: (Rounded.apply(args[0], forward, backward),))
        return engines.train(engine, engines.batches(2))


def job_formats(forward: str | None, backward: str | None, **changes: Any) -> dict[str, Any]:
    """Train with links of these formats; return errors, the sizes of a step's messages, an evaluation and the log."""
    sent: list[int] = []
    isend = torch.distributed.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    links = {"forward": forward, "backward": backward}
    with (
        engines.logged() as said,
        engines.engine_of(engines.gpt_layers(), engines.unchecked(links=links, **changes)) as engine,
    ):
        evaluated = float(engine.eval_batch(iter(engines.batches(1)[0])))
        run = engines.train(engine, engines.batches(2))
        with mock.patch.object(torch.distributed, "isend", counted):
            engine.train_batch(iter(engines.batches(1)[0]))
    with engines.engine_of(engines.gpt_layers(), None, stages=1) as engine:
        of_stock = float(engine.eval_batch(iter(engines.batches(1)[0])))
    return {
        "errors": engines.differences(run, stock_with(forward, backward, cuts=1)),
        "from exact": engines.differences(run, engines.stock_run())["gradient"],
        "sent": sent,
        "evaluation": abs(evaluated - of_stock) / of_stock,
        "said": [line for line in said if "terapipe.links" in line],
    }


MESSAGES = 2 * 3, 2 * 2 * 23  # of a step of two micro-batches in three slices; their tokens over both rows


@pytest.mark.parametrize(
    ("forward", "backward", "schedule"),
    [("bf16", None, "seq1f1b"), ("fp8", None, "zb-h1"), ("int8", "bf16", "seq1f1b"), (None, "bf16", "terapipe")],
)
@pytest.mark.sample(1)
def test_training_is_that_of_layers_with_rounding_between_them(
    forward: str | None, backward: str | None, schedule: str
) -> None:
    """Check that formats equal torch's casts for any slices, and that nothing else is rounded, evaluations included."""
    first, last = rank_pool(2).run(job_formats, forward=forward, backward=backward, schedule=schedule)
    assert not engines.violations([first["errors"], last["errors"]], limit=1e-7)
    assert max(first["from exact"], last["from exact"]) > 1e-4, "the formats do something"
    assert max(first["evaluation"], last["evaluation"]) < 1e-6
    numbers, tokens = {None: 8 * 16, "bf16": 2 * 16, "fp8": 16 + 4, "int8": 16 + 4}, MESSAGES[1]
    for sent, of_format in ((first["sent"], forward), (last["sent"], backward)):
        expected = tokens * numbers[of_format]
        assert len(sent) == MESSAGES[0] and expected <= sum(sent) <= expected + 16 * len(sent)
    assert len(first["said"]) == 1 and not last["said"]
    assert f"activations travel as {forward or 'they are'}, gradients as {backward or 'they are'}" in first["said"][0]
    assert "no longer equal" in first["said"][0]


def job_exact_first_links() -> list[Any]:
    """Return the formats of this stage's wires, and whether a part's link stays exact."""
    links = {"forward": "int8", "backward": "bf16", "exact_until_part": 1}
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(links=links), stages=3) as engine:
        wires, ends = engine._wires, [(0, 0, 1, 0), (1, 0, 2, 0)]
        return [
            tuple(wire.wire_format for wire in wires.by_ends[each])
            for each in ends
            if engine.stage_id in (each[0], each[2])
        ]


def test_early_links_stay_exact() -> None:
    exact, packed = (None, None), ("int8", "bf16")
    assert rank_pool(3).run(job_exact_first_links) == [[exact], [exact, packed], [packed]]


def job_without_fp8() -> tuple[str, str]:
    other = SimpleNamespace(ones=mock.Mock(side_effect=RuntimeError("no kernel")))
    with mock.patch.object(formats, "torch", other) if torch.distributed.get_rank() == 1 else nullcontext():
        return engines.raised_by(
            lambda: engines.build(engines.gpt_layers(), engines.unchecked(links={"forward": "fp8"}))
        )


def test_a_format_that_one_rank_lacks_is_refused_on_every_rank() -> None:
    for kind, text in rank_pool(2).run(job_without_fp8):
        assert kind == "TeraPipeConfigError" and "on rank 1" in text
        assert "cannot convert to float8_e4m3fn on cpu (no kernel)" in text and 'take "int8"' in text


def job_measured(folder: str, links: dict[str, Any]) -> int:
    """Plan from measured costs; return how many profiles are kept then."""
    terapipe = engines.unchecked(slices="auto", granularity_tokens=8, links=links, planner={"cache_dir": folder})
    with engines.engine_of(engines.fp32_layers(), terapipe) as engine:
        engines.train(engine, engines.batches(1))
    return len(list(Path(folder).iterdir()))


def test_measured_links_carry_the_formats(tmp_path: Path) -> None:
    """A sample is the mean of both ways, of two rows: 16 fp32 numbers a token, 20 bytes in int8, 32 in bf16."""
    pool, seen = rank_pool(2), []
    for index, links in enumerate(({}, {"forward": "int8"}, {"forward": "int8", "backward": "bf16"})):
        assert pool.run(engines.with_few_rounds, job=job_measured, folder=str(tmp_path), links=links)[0] == index + 1
        (path,) = {*tmp_path.iterdir()} - {path for path, _ in seen}
        seen.append((path, {link.tokens: link.num_bytes for link in Profile.load(path).links}))
    of_token = {0: 2 * 64, 1: 2 * (20 + 64) // 2, 2: 2 * (20 + 32) // 2}
    for index, (_, measured) in enumerate(seen):
        assert measured and all(0 <= size - of_token[index] * tokens <= 16 for tokens, size in measured.items())


def limits_of_groups() -> list[float]:
    """Return the seconds after which torch would end a wait of each group that an engine waits on within a batch."""
    with engines.engine_of(engines.gpt_layers(), engines.unchecked()) as engine:
        groups = engine._groups
        made = [groups.control, groups.world, *(each for both in groups.by_wire.values() for each in both)]
        kind = torch.device("cpu")
        return [each._get_backend(kind).options._timeout.total_seconds() for each in made]


def test_torch_ends_no_wait_that_the_watchdog_allows() -> None:
    """A draw may take `data_timeout_s`, and a receive that is posted ahead waits from the first action on."""
    for limits in rank_pool(2).run(limits_of_groups):
        assert len(limits) == 4
        assert min(limits) > 24 * 3600.0
