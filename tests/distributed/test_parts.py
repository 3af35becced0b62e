"""Test stages with several parts of the layers, and parts at two places, beyond the cases of
`tests/test_transparency.py`."""

import functools
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import terapipe_ds
from terapipe_ds.config import TeraPipeConfigError
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.small_models.parts import Embedding, Head, Mlp, cross_entropy

LOOP = {"schedule": "seq1f1b-interleaved", "chunks_per_stage": 2}
LOOP_ZB = {"schedule": "seq1f1b-interleaved-zb", "chunks_per_stage": 2}
ZBV = {"schedule": "zbv"}
BOTH_WAYS = {"schedule": "chimera-seq"}
LAYOUTS = {"loop": LOOP, "v": ZBV, "both_ways": BOTH_WAYS}


# -- more stages, more parts ---------------------------------------------------------------------------------


def job_four_stages(changes: dict[str, Any], num_micro_batches: int) -> dict[str, float]:
    model = {"num_layers": 9, "tied_embedding": True}
    ours = engines.run_training(
        lambda: engines.gpt_layers(**model),
        engines.unchecked(**changes),
        engines.batches(2, num_micro_batches),
        stages=4,
        gradient_accumulation_steps=num_micro_batches,
    )
    return engines.differences(ours, engines.stock_run(2, num_micro_batches, **model))


@pytest.mark.parametrize(
    ("changes", "num_micro_batches"),
    [
        ({"schedule": "interleaved", "chunks_per_stage": 2}, 5),
        ({"schedule": "seq1f1b-interleaved", "chunks_per_stage": 3}, 2),
        (LOOP_ZB, 2),
        ({"schedule": "zbv"}, 2),
        ({"schedule": "chimera"}, 6),
        ({"schedule": "chimera-seq"}, 1),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else str(value),
)
@pytest.mark.sample(2)
def test_four_stages(changes: dict[str, Any], num_micro_batches: int) -> None:
    errors = rank_pool(4).run(job_four_stages, changes=changes, num_micro_batches=num_micro_batches)
    assert not engines.violations(errors)


# -- layers that move ----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Have a buffer and a frozen parameter, whose initial values every rank draws for itself, or from a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.float64) * 0.3)
        self.frozen = nn.Parameter(torch.randn(16, dtype=torch.float64), requires_grad=False)
        self.register_buffer("offset", torch.randn(16, dtype=torch.float64), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(hidden @ self.weight) * self.frozen + self.offset


def state(module: Any) -> dict[str, tuple[Tensor, bool]]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (tensor.detach().clone(), tensor.requires_grad) for name, tensor in tensors.items()}


def job_values(changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a rank's values before and after its layers move; random numbers must match an unmoved module's."""
    torch.manual_seed(torch.distributed.get_rank())  # other values on every rank
    embed, *decoder, norm, head = engines.gpt_layers()
    layers = [embed, LayerSpec(Counting), *decoder, LayerSpec(Counting), norm, head]
    module = engines.pipeline_module(layers)
    for parameter in module.parameters():  # as loading a checkpoint of another kind does
        parameter.data += 1.0
    before, drawn = state(module), torch.get_rng_state()
    ds_config = engines.config(terapipe=engines.unchecked(**changes))
    terapipe_ds.lay_out(module, ds_config)
    untouched = torch.equal(drawn, torch.get_rng_state())
    return before, state(module), untouched


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_stay_when_layers_move(layout: str) -> None:
    ranks = rank_pool(2).run(job_values, changes=LAYOUTS[layout])
    before: dict[str, Any] = {}
    for mine, _, untouched in ranks:
        assert untouched, "moving layers drew random numbers"
        before |= mine
    moved = 0
    after: set[str] = set()
    for mine, now, _ in ranks:
        after |= set(now)
        moved += len(set(now) - set(mine))
        for name, (value, trained) in now.items():
            assert torch.equal(value, before[name][0]) and trained == before[name][1], name
    assert moved > 0
    assert after == set(before)


def job_groups(changes: dict[str, Any], early: bool, own_optimizer: bool = False) -> Any:
    """Train with two parameter groups, made before the layers move or after; or with an optimizer of them."""
    module = engines.pipeline_module(engines.gpt_layers())
    ds_config = engines.config(terapipe=engines.unchecked(**changes))
    if not early:
        terapipe_ds.lay_out(module, ds_config)
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "lr": 3e-2},
        {"params": [p for p in module.parameters() if p.dim() == 1]},
    ]
    try:
        made = {"optimizer": torch.optim.Adam(groups, lr=1e-2)} if own_optimizer else {"model_parameters": groups}
        if own_optimizer:
            del ds_config["optimizer"]
        engine = terapipe_ds.initialize(model=module, config=ds_config, **made)[0]
    except TeraPipeConfigError as error:
        return str(error)
    engines.reduce_in_fp64(engine)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.train_batch(iter(engines.batches(1)[0]))
    steps = {name: float((p - before[name]).abs().max()) for name, p in engine.module.named_parameters() if p.dim() > 1}
    engine.destroy()
    return steps


@pytest.mark.parametrize("own_optimizer", [False, True])
def test_what_was_made_before_the_layers_move_is_refused(own_optimizer: bool) -> None:
    for text in rank_pool(2).run(job_groups, changes=BOTH_WAYS, early=True, own_optimizer=own_optimizer):
        assert "Call terapipe_ds.lay_out(module, ds_config)" in text


@pytest.mark.parametrize("own_optimizer", [False, True])
def test_what_is_made_after_the_layers_moved_trains(own_optimizer: bool) -> None:
    for steps in rank_pool(2).run(job_groups, changes=LOOP, early=False, own_optimizer=own_optimizer):
        assert steps and all(step == pytest.approx(3e-2, rel=0.05) for step in steps.values())


CHANGES: dict[str, tuple[str, Any]] = {
    "a hook of the layer": ("layer itself", lambda layer: layer.register_forward_hook(lambda module, x, y: y * 0.5)),
    "a hook of a weight": ("attention.out.weight", lambda layer: layer.attention.out.weight.register_hook(torch.neg)),
    "another forward": ("attention.out", lambda layer: setattr(layer.attention.out, "forward", torch.neg)),
    "another class": ("attention.out", lambda layer: nn.utils.parametrizations.weight_norm(layer.attention.out)),
    "one more module": ("scale", lambda layer: setattr(layer, "scale", nn.Linear(2, 2))),
    "another number": ("attention_norm", lambda layer: setattr(layer.attention_norm, "eps", 0.5)),
}


def job_changed(change: str, changes: dict[str, Any], first: bool) -> tuple[str, str]:
    """Change decoders after the module is built; `first`: after its layers have their stages, too."""
    module, terapipe = engines.pipeline_module(engines.gpt_layers()), engines.unchecked(**changes)
    if first:
        terapipe_ds.lay_out(module, engines.config(terapipe=terapipe))
    for layer in module.modules():
        if type(layer).__name__ == "DecoderLayer":
            CHANGES[change][1](layer)
    with engines.started(module, terapipe) as engine:
        return engines.step_error(engine)


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_the_program_has_changed_are_not_built_anew(change: str) -> None:
    """They trained without the change before, and weights of other names made the stages wait for one another."""
    for kind, text in rank_pool(2).run(job_refusal_of_change, change=change):
        assert kind == "TeraPipeConfigError" and f"{CHANGES[change][0]}" in text
        assert "was changed after the PipelineModule was built" in text and "change the layers then" in text


def job_refusal_of_change(change: str) -> tuple[str, str]:
    return engines.raised_by(lambda: job_changed(change, ZBV, first=False))


def test_layers_may_be_changed_when_they_have_their_stages() -> None:
    assert rank_pool(2).run(job_changed, change="a hook of the layer", changes=ZBV, first=True) == [("", "")] * 2


def job_muon_marks(changes: dict[str, Any]) -> list[dict[str, bool]]:
    """Return which parameters Muon is to update, of the stock engine on one stage and of ours."""
    marks = []
    for stages, each in ((1, None), (2, engines.unchecked(**changes))):
        options = {"stages": stages, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
        by_hand = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3)}  # loads nothing of Muon
        with engines.engine_of(engines.gpt_layers(), each, initialize=by_hand, **options) as engine:
            marks.append({name: p.use_muon for name, p in engine.module.named_parameters()})
    return marks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_finds_its_parameters_among_layers_that_moved(layout: str) -> None:
    for stock, ours in rank_pool(2).run(job_muon_marks, changes=LAYOUTS[layout]):
        assert set(ours.values()) == {True, False} and ours.items() <= stock.items()


def job_shared(as_argument: bool, schedule: str, second: int) -> tuple[str, str]:
    """Build six layers of two to four parts. Layer 1 and the second layer are one object, or are made of one."""
    shared, layers = Mlp(), [LayerSpec(Embedding), *[LayerSpec(Mlp)] * 3, torch.tanh, LayerSpec(Head)]
    layers[1] = layers[second] = LayerSpec(nn.Sequential, shared) if as_argument else shared
    return engines.raised_by(lambda: engines.build(layers, engines.section(schedule=schedule)).destroy())


@pytest.mark.parametrize(
    ("as_argument", "schedule", "second", "where"),
    [(False, "zbv", 2, "stage 0, layer 2 on stage 1"), (True, "1f1b", 3, "stage 0, layer 3 on stage 1"),
     (False, "seq1f1b", 2, ""), (True, "chimera", 2, "")],
)  # fmt: skip
def test_an_object_that_two_stages_would_train(as_argument: bool, schedule: str, second: int, where: str) -> None:
    job = {"as_argument": as_argument, "schedule": schedule, "second": second}
    for kind, text in rank_pool(2).run(job_shared, **job):
        assert kind == ("TeraPipeConfigError" if where else "") and where in text


# -- each layout ---------------------------------------------------------------------------------------------


@functools.cache
def stock_evaluation() -> tuple[float, Tensor, Any]:
    """Evaluate by one stage of the stock engine; it adds outputs to the earlier loss, hence two engines."""
    data = engines.batches(1, 3, first_seed=50)[0]
    with engines.engine_of(engines.gpt_layers(), None, stages=1) as engine:
        loss, logits = engine.eval_batch(iter(data), return_logits=True, num_micro_batches=3)
    with engines.engine_of(engines.gpt_layers(), None, stages=1) as engine:
        outputs = engine.eval_batch(iter(data), compute_loss=False, reduce_output=None, num_micro_batches=3)
    return float(loss), logits, list(outputs)


def job_layout(changes: dict[str, Any]) -> dict[str, Any]:
    """Evaluate, train and go beyond the end of the data, with every check and profiler; then spoil a weight."""
    expected, data = stock_evaluation(), engines.batches(1, 3, first_seed=50)[0]
    watched = {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "/dev/null"}}
    ours = engines.section(**changes, verify="first_batch", check_finite="every_step")
    with engines.engine_of(engines.gpt_layers(), ours, wall_clock_breakdown=True, **watched) as engine:
        loss, logits = engine.eval_batch(iter(data), return_logits=True, num_micro_batches=3)
        outputs = engine.eval_batch(iter(data), compute_loss=False, reduce_output=None, num_micro_batches=3)
        found: dict[str, Any] = {"loss": engines.error_of(float(loss), expected[0])}
        if engine.is_last_stage():
            found["logits"] = max(engines.error_of(logits, expected[1]), engines.error_of(list(outputs), expected[2]))
        found["training"] = engines.differences(engines.train(engine, engines.batches(2)), engines.stock_run())
        found["end of the data"] = engines.step_error(engine, engines.batches(1)[0][:1])[0]
        found["goes on"] = float(engine.train_batch(iter(engines.batches(1)[0])))
        for name, parameter in engine.module.named_parameters():
            if name.startswith("2."):
                parameter.data[0] = float("nan")
        found["not finite"] = engines.step_error(engine)[1]
    embed, *decoder, norm, head = engines.gpt_layers()
    mixing = [embed, *decoder, LayerSpec(Mean), norm, head]
    with engines.engine_of(mixing, engines.section(**changes, verify="first_batch")) as engine:
        found["called"] = engines.raised_by(lambda: engine.module(data[0][0]))
        found["mixes tokens"] = engines.step_error(engine)
    return found


class Mean(nn.Module):
    """Mix the tokens of a sequence."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.mean(dim=1, keepdim=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_checks_and_profilers(layout: str) -> None:
    ranks = rank_pool(2).run(job_layout, changes=LAYOUTS[layout])
    assert not engines.violations([rank["training"] for rank in ranks])
    assert len([rank for rank in ranks if "logits" in rank]) == 1
    assert ranks[0]["goes on"] == pytest.approx(ranks[1]["goes on"], rel=1e-6)
    for rank in ranks:
        assert rank["loss"] <= engines.FP32_SCALAR and rank.get("logits", 0.0) < engines.EXACT
        assert rank["called"][0] == "RuntimeError" and "this call does not say which" in rank["called"][1]
        assert rank["end of the data"] == "StopIteration"
        assert "layer 2 (DecoderLayer)" in rank["not finite"]
    assert "layer 5 (Mean)" in engines.of_rank_0([rank["mixes tokens"] for rank in ranks])[1]


# -- what else must go on ------------------------------------------------------------------------------------


def job_v() -> tuple[int, list[list[int]]]:
    """Count what a stage draws, and tell which ranks share a tied weight."""
    drawn = []

    def watched(batch: Any) -> Any:
        for each in batch:
            drawn.append(1)
            yield each

    with engines.engine_of(engines.gpt_layers(tied_embedding=True), engines.unchecked(**ZBV)) as engine:
        engine.train_batch(watched(engines.batches(1)[0]))
        return len(drawn), [comm["ranks"] for comm in engine.module.tied_comms.values()]


def test_on_a_v_the_first_stage_has_both_ends() -> None:
    """It alone draws data; embedding and head, which are both there, need no sum."""
    assert rank_pool(2).run(job_v) == [(2, [[0]]), (0, [])]


# -- schedules from a file -----------------------------------------------------------------------------------

BY_HAND = {  # two micro-batches of two slices; on the V a bubble is filled as no generator does it
    "plain.csv": """
        F0.0,F0.1,F1.0,F1.1,B0.1,B0.0,B1.1,B1.0
        F0.0,F0.1,B0.1,B0.0,F1.0,F1.1,B1.1,B1.0
    """,
    "v.csv": """
        placement,0/3,1/2
        F0.0c0,F0.1c0,F0.0c1,F0.1c1,B0.1c1,F1.0c0,B0.0c1,F1.1c0,F1.0c1,B0.1c0,B0.0c0,F1.1c1,B1.1c1,B1.0c1,B1.1c0,B1.0c0
        F0.0c0,F0.0c1,F0.1c0,F0.1c1,F1.0c0,F1.0c1,B0.1c1,B0.1c0,W0.1c1,B0.0c1,B0.0c0,F1.1c0,F1.1c1,B1.1c1,W0.0c1,B1.1c0,B1.0c1,B1.0c0,W1.1c1,W1.0c1
    """,
}


@functools.cache
def trained_and_evaluated() -> float:
    with engines.engine_of(engines.gpt_layers(), None) as engine:
        engines.train(engine, engines.batches(2))
        return float(engine.eval_batch(iter(engines.batches(1, 3)[0]), num_micro_batches=3))


def job_file(path: str) -> tuple[dict[str, float], float, float, list[str]]:
    written = Path(path).read_text().split()
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(schedule=path, slices=2)) as engine:
        ours = engines.train(engine, engines.batches(2))
        evaluated = float(engine.eval_batch(iter(engines.batches(1, 3)[0]), num_micro_batches=3))
        ran = engine._plans.schedule(path, True, (2, 2)).compute_order(engine.stage_id)
    assert ",".join(ran) == written[-2 + torch.distributed.get_rank()]
    return engines.differences(ours, engines.stock_run()), evaluated, trained_and_evaluated(), ran


@pytest.mark.parametrize("name", BY_HAND)
def test_a_schedule_written_by_hand(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(textwrap.dedent(BY_HAND[name]).strip() + "\n")
    ranks = rank_pool(2).run(job_file, path=str(path))
    assert not engines.violations([rank[0] for rank in ranks])
    for _, evaluated, expected, _ in ranks:
        assert evaluated == pytest.approx(expected, rel=1e-6)


def job_file_refused(paths: list[str], num_micro_batches: int = 2, slices: Any = 2) -> str:
    path = paths[torch.distributed.get_rank()]

    def run() -> None:
        options = {"gradient_accumulation_steps": num_micro_batches}
        with engines.engine_of(
            engines.gpt_layers(), engines.unchecked(schedule=path, slices=slices), **options
        ) as engine:
            engine.train_batch(iter(engines.batches(1, num_micro_batches)[0]))

    return engines.raised_by(run)[1]


@pytest.mark.parametrize(
    ("num_micro_batches", "slices", "message"),
    [
        (3, 2, "has 2 micro-batches, a batch 3: set gradient_accumulation_steps to 2"),
        (2, 3, "has 2 slices of micro-batch 0, the plan 3"),
        (2, "auto", "the schedule in .* is for a number of slices"),
    ],
)
def test_a_file_that_does_not_fit(num_micro_batches: int, slices: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text(textwrap.dedent(BY_HAND["plain.csv"]).strip())
    paths = [str(path)] * 2
    for text in rank_pool(2).run(job_file_refused, paths=paths, num_micro_batches=num_micro_batches, slices=slices):
        assert re.search(message, text)


def test_a_micro_batch_that_changes_its_direction(tmp_path: Path) -> None:
    path = tmp_path / "mixed.csv"
    path.write_text("placement,0/1,1/0\nF0.0c0,F0.0c1,B0.0c1,B0.0c0\nF1.0c1,F1.0c0,B1.0c0,B1.0c1\n")
    texts = rank_pool(2).run(job_file_refused, paths=[str(path)] * 2, slices=1)
    assert all("stay in one chunk" in text for text in texts), texts


def job_by_hand_elsewhere() -> list[str]:
    plan = terapipe_ds.SlicePlan((20, 3))
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(**LOOP)) as engine:
        return [
            engines.raised_by(lambda name=name: engine.use_slice_plan(plan, name))[1]  # type: ignore[misc]
            for name in ("interleaved", "zbv", "seq1f1b")
        ]


def test_layers_stay_where_they_are() -> None:
    for other_order, other_places, one_part in rank_pool(2).run(job_by_hand_elsewhere):
        assert other_order == ""
        assert "needs another layout of the layers" in other_places
        assert "has one part per stage" in one_part


# -- options of a schedule -----------------------------------------------------------------------------------


def job_options(changes: dict[str, Any], num_micro_batches: int) -> tuple[dict[str, float], list[str], Any]:
    ours = engines.unchecked(**changes, slices=2)
    with engines.engine_of(engines.gpt_layers(), ours, gradient_accumulation_steps=num_micro_batches) as engine:
        run = engines.train(engine, engines.batches(2, num_micro_batches))
        engine.eval_batch(iter(engines.batches(1, 2)[0]), num_micro_batches=2)
        ran = engine._plans.schedule(changes["schedule"], True, (2,) * num_micro_batches)
        described = engine._plans.described()["config"]["schedule_options"]
        return (
            engines.differences(run, engines.stock_run(2, num_micro_batches)),
            ran.compute_order(engine.stage_id),
            described,
        )


@pytest.mark.parametrize(
    ("changes", "num_micro_batches", "places"),
    [
        # the first of two stages runs three micro-batches before its first backward, the second one one
        ({"schedule": "dapple", "schedule_options": {"policy": "B"}}, 4, [("B0.1", 6), ("B0.1", 2)]),
        # with room for one micro-batch its W run before the next F (which is at 2 and 4 by default)
        ({**ZBV, "schedule_options": {"max_live_slices": 4}}, 2, [("F1.0c0", 7), ("F1.0c0", 9)]),
        ({**LOOP_ZB, "schedule_options": {"max_live_slices": 4}}, 2, [("F1.0c0", 9), ("F1.0c0", 12)]),
    ],
    ids=["dapple", "zbv", "loop"],
)
def test_options_of_a_schedule(changes: dict[str, Any], num_micro_batches: int, places: list[tuple[str, int]]) -> None:
    ranks = rank_pool(2).run(job_options, changes=changes, num_micro_batches=num_micro_batches)
    assert not engines.violations([errors for errors, *_ in ranks])
    for (_, order, described), (action, place) in zip(ranks, places, strict=True):
        assert order[place] == action
        assert described == changes["schedule_options"]


# -- seeds ---------------------------------------------------------------------------------------------------


def seeded_layers() -> list[Any]:
    """Return layers of equal size, so that both partition methods of DeepSpeed cut them alike."""
    torch.manual_seed(torch.distributed.get_rank())  # nothing but the seeds of layers makes ranks alike
    return [LayerSpec(Counting) for _ in range(8)]


def job_seeded(changes: dict[str, Any]) -> dict[str, float]:
    """Build the module before the plugin is registered, so that the engine has to guess how it was cut."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(2, engines.LENGTH, 16, dtype=torch.float64, generator=generator) for _ in range(8)]
    data = [list(zip(rows[:2], rows[2:4], strict=True)), list(zip(rows[4:6], rows[6:], strict=True))]
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "module": {"seed_layers": True, "base_seed": 7}}
    stock = engines.run_training(seeded_layers, None, data, stages=1, **options)
    return engines.differences(
        engines.run_training(seeded_layers, engines.unchecked(loss_reduction="mean", **changes), data, **options), stock
    )


@pytest.mark.parametrize("changes", [ZBV, BOTH_WAYS, {"schedule": "interleaved", "chunks_per_stage": 2}])
@pytest.mark.sample(1)
def test_seeded_layers_have_the_values_of_the_stock_engine(changes: dict[str, Any]) -> None:
    assert not engines.violations(rank_pool(2).run(job_seeded, changes=changes))


# -- planning ------------------------------------------------------------------------------------------------


def job_planned(changes: dict[str, Any]) -> tuple[dict[str, float], list[int], str, list[int], Any]:
    planned = engines.unchecked(**{"slices": "auto", "granularity_tokens": 4, **changes})
    with engines.engine_of(engines.gpt_layers(), planned) as engine:
        ours = engines.train(engine, engines.batches(2))
        planner = engine._plans._planner
        choice, (profile,) = engine._plans._choice(engines.LENGTH), planner.profiles._known.values()
        measured = [part.part_id for part in profile.parts]
    return (
        engines.differences(ours, engines.stock_run()),
        list(choice.plans[0].lengths),
        choice.schedule,
        measured,
        profile.pipeline_stages,
    )


@pytest.mark.parametrize(
    ("changes", "names", "num_parts"),
    [
        (ZBV, {"zbv"}, 4),
        (
            {"schedule": "auto", "chunks_per_stage": 2, "slices": 3},
            {LOOP["schedule"], LOOP_ZB["schedule"], "interleaved"},
            4,
        ),
        pytest.param(BOTH_WAYS, {"chimera-seq"}, 2, marks=pytest.mark.full),
    ],
)
def test_slices_are_planned_from_the_costs_of_all_parts(
    changes: dict[str, Any], names: set[str], num_parts: int
) -> None:
    first, second = rank_pool(2).run(engines.with_few_rounds, job=job_planned, changes=changes)
    assert not engines.violations([first[0], second[0]])
    assert first[1:] == second[1:]
    assert sum(first[1]) == engines.LENGTH
    assert first[2] in names
    assert first[3] == list(range(num_parts)) and first[4] == 2


class Numbering(Embedding):
    """Hand on a buffer that counts the forwards, beside the hidden states."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Any:
        self.count += 1
        return super().forward(ids), self.count


class Numbered(Head):
    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs[0]) * inputs[1]


def job_numbering(schedule: str) -> dict[str, float]:
    layers, data = [LayerSpec(Numbering), LayerSpec(Numbered)], engines.batches(2)
    options: dict[str, Any] = {"stages": 1, "loss_fn": cross_entropy}
    ours = engines.run_training(
        lambda: layers, engines.unchecked(schedule=schedule, slices=1, chunks_per_stage=2), data, **options
    )
    return engines.differences(ours, engines.run_training(lambda: layers, None, data, **options))


def test_a_buffer_that_a_layer_hands_on_may_change_before_it_is_read(tmp_path: Path) -> None:
    """The next part read the value of a later micro-batch; over gloo a message could have it too."""
    (path := tmp_path / "late.csv").write_text("F0.0,F1.0,F0.0c1,F1.0c1,B0.0c1,B1.0c1,B0.0,B1.0\n")
    assert not engines.violations(rank_pool(2).run(job_numbering, schedule=str(path)))


def job_seed_layers(seeds: bool) -> list[str]:
    options: dict[str, Any] = {"stages": 2, "loss_fn": cross_entropy, "module": {"seed_layers": seeds}}
    layers, section = [LayerSpec(Embedding), LayerSpec(Head)], engines.unchecked(schedule="1f1b")
    with engines.logged() as lines:
        engines.run_training(lambda: layers, section, engines.batches(1), pipeline={"seed_layers": True}, **options)
    return [line for line in lines if "seed_layers" in line]


def test_a_key_that_deepspeeds_own_tests_set_for_nothing_is_warned_of() -> None:
    assert [list(map(len, rank_pool(2).run(job_seed_layers, seeds=seeds))) for seeds in (False, True)] == [
        [1, 0],
        [0, 0],
    ]
