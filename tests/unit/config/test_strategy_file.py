"""`terapipe.strategy`: what the section takes from the file, and what may stand beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.planner.strategy import Strategy

FIELDS: dict[str, Any] = {
    "axes": ["pipe", "data", "model"], "dims": [2, 2, 1], "devices_per_node": 2, "partition": [0, 3, 7],
    "schedule": "seq1f1b", "slices": [9, 8, 6], "micro_batch_size": 2, "accumulation": 3, "recompute": [1],
    "zero_stage": 1, "dtype": "bfloat16", "predicted_s": 1.0, "lower_bound_s": 1.0, "memory_bytes": [1, 1],
}  # fmt: skip


def config_of(folder: Path, section: dict[str, Any] | None = None, /, strategy: Any = None, **more: Any) -> Any:
    """Read a config that names a strategy and fits it, with other values in the section and beside it."""
    path = folder / "strategy.json"
    path.write_text(strategy if isinstance(strategy, str) else Strategy(**FIELDS | (strategy or {})).to_json())
    whole = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **more}
    return TeraPipeConfig.from_deepspeed(
        {**whole, "terapipe": {"enabled": True, "strategy": str(path), **(section or {})}}
    )


def test_the_section_says_what_the_strategy_says(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"verify": "off"})
    assert (config.schedule, config.slices, config.partition) == ("seq1f1b", (9, 8, 6), (0, 3, 7))
    assert (config.recompute, config.chunks_per_stage, config.verify) == ((1,), 1, "off")
    assert config.planned == Strategy(**FIELDS)
    assert config.plan_for(23).lengths == (9, 8, 6)
    with pytest.raises(TeraPipeConfigError, match=r"strategy\.json'.* adds up to 23 tokens.*plan again for 24"):
        config.plan_for(24)


@pytest.mark.parametrize(
    "changes", [{}, {"slices": [23], "schedule": "1f1b", "recompute": "full"}, {"slices": [12, 11]}]
)
def test_what_it_writes_for_deepspeed_may_stay_beside_it(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = Strategy(**FIELDS | changes).to_deepspeed()
    beside = config_of(tmp_path, whole.pop("terapipe"), strategy=changes, **whole)
    alone = config_of(tmp_path, strategy=changes)
    assert beside.model_dump() == alone.model_dump() and beside.planned == alone.planned


@pytest.mark.parametrize("same", [{"slices": 2}, {"recompute": "full"}, {"recompute": [1, 0]}, {"partition": None}])
def test_another_way_to_say_the_same_is_no_contradiction(same: dict[str, Any], tmp_path: Path) -> None:
    assert config_of(tmp_path, same, strategy={"slices": [12, 11], "recompute": [0, 1]}).slices == (12, 11)


@pytest.mark.parametrize(("section", "beside", "given", "wanted"), [
    ({"schedule": "terapipe"}, {}, "terapipe.schedule = 'terapipe'", "'seq1f1b'"),
    ({"schedule": "auto"}, {}, "terapipe.schedule = 'auto'", "'seq1f1b'"),
    ({"slices": "auto"}, {}, "terapipe.slices = 'auto'", "[9, 8, 6]"),
    ({"slices": 3}, {}, "terapipe.slices = 3", "[9, 8, 6]"),
    ({"slices": [8, 9, 6]}, {}, "terapipe.slices = [8, 9, 6]", "[9, 8, 6]"),
    ({"partition": [0, 4, 7]}, {}, "terapipe.partition = [0, 4, 7]", "[0, 3, 7]"),
    ({"recompute": "off"}, {}, "terapipe.recompute = 'off'", "[1]"),
    ({"recompute": [0]}, {}, "terapipe.recompute = [0]", "[1]"),
    ({}, {"train_batch_size": 13}, "train_batch_size = 13", "12"),
    ({}, {"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu = 1", "2"),
    ({}, {"gradient_accumulation_steps": 1}, "gradient_accumulation_steps = 1", "3"),
    ({}, {"zero_optimization": {"stage": 0}}, "zero_optimization.stage = 0", "1"),
    ({}, {"zero_optimization": {}}, "zero_optimization.stage = 0", "1"),
    ({}, {"bf16": {}}, "the precision = 'float32'", "'bfloat16'"),
    ({}, {"zero_optimization": {"stage": 1, "cpu_offload": True}}, "offload_optimizer.device = 'cpu'", "'none'"),
    ({}, {"bf16": {}, "bfloat16": {"enabled": True}}, "the precision = 'float32'", "'bfloat16'"),
    ({}, {"bf16": {}, "fp16": {"enabled": True}}, "the precision = 'float16'", "'bfloat16'"),
])  # fmt: skip
def test_contradictions(
    section: dict[str, Any], beside: dict[str, Any], given: str, wanted: str, tmp_path: Path
) -> None:
    with pytest.raises(TeraPipeConfigError) as caught:
        config_of(tmp_path, section, **beside)
    (problem,) = caught.value.problems
    assert "strategy.json'" in problem and f"{given}: the strategy says {wanted}; " in problem
    assert problem.endswith("or plan again")
    # where leaving it out would change nothing, the next step is another one
    stands = {**section, **beside}.get(given.partition(" =")[0].removeprefix("terapipe."))
    assert ("leave it out" in problem) == (stands is not None), problem


def test_a_file_that_is_no_strategy_is_refused(tmp_path: Path) -> None:
    broken = json.loads(Strategy(**FIELDS).to_json())
    for text, message in (("[", "no JSON"), (json.dumps(broken | {"slices": []}), "slices")):
        with pytest.raises(TeraPipeConfigError, match=f"strategy.json': .*{message}.*give what"):
            config_of(tmp_path, strategy=text)
    (tmp_path / "strategy.json").unlink()
    section = {"enabled": True, "strategy": str(tmp_path / "strategy.json")}
    with pytest.raises(TeraPipeConfigError, match=r"cannot read it \(No such file.*give a file that"):
        TeraPipeConfig.from_deepspeed({"terapipe": section})
    assert not TeraPipeConfig.from_deepspeed({"terapipe": section | {"enabled": False}}).enabled


def test_a_plan_for_each_micro_batch(tmp_path: Path) -> None:
    slices = [[9, 8, 6], [12, 11], [23]]
    strategy = Strategy(**FIELDS | {"slices": slices})
    assert [plan.lengths for plan in strategy.plans] == [(9, 8, 6), (12, 11), (23,)] and strategy.plan is None
    assert Strategy.from_json(strategy.to_json()) == strategy and "1 to 3 slices" in str(strategy)
    assert strategy.to_deepspeed()["terapipe"]["slices"] == slices
    config = config_of(tmp_path, {"slices": slices}, strategy={"slices": slices})
    assert config.slices == ((9, 8, 6), (12, 11), (23,))
    with pytest.raises(TeraPipeConfigError, match=r"terapipe.slices = \[12, 11\]: the strategy says \[\[9, 8, 6\], "):
        config_of(tmp_path, {"slices": [12, 11]}, strategy={"slices": slices})
    for wrong in (slices[:2], [[9, 8, 6], [12, 11], [22]]):
        with pytest.raises(TeraPipeConfigError, match="give a list of lengths, or 3 with the same sum"):
            config_of(tmp_path, strategy={"slices": wrong})


def test_one_plan_is_that_of_all() -> None:
    strategy = Strategy(**FIELDS)
    assert strategy.plan == strategy.plans[2] and len(strategy.plans) == 3
    assert json.loads(strategy.to_json())["slices"] == [9, 8, 6], "as before"
