"""Arguments of Trainers over stages, in one process."""

import contextlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra trl: pip install terapipe_ds[trl]")

from transformers import AutoModelForCausalLM, Trainer

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.costs.devices import device_card
from terapipe_ds.integrations.trainer import PipelineTrainerMixin, mixin
from terapipe_ds.integrations.trainer.refusals import outer_arguments
from terapipe_ds.integrations.trainer.stages import Stages, enabled_config
from terapipe_ds.integrations.trainer.token_loss import TokenLoss
from terapipe_ds.models.hugging_face import ModelRefusedError
from terapipe_ds.models.hugging_face.weights.quantized import quantize
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.strategy import plan_strategy
from tests.hugging_face_families import IS_4, config_of


class OtherOrder(PipelineTrainerMixin, Trainer):
    def __init__(self, args: Any, model: Any, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)


def test_a_class_may_take_its_arguments_in_another_order() -> None:
    """The mixin gets those of the classes after it."""
    given = outer_arguments(OtherOrder, PipelineTrainerMixin, ("model", "args"), {"callbacks": None})
    assert given == {"model": "model", "args": "args", "callbacks": None}


def without_start(kind: type, **fields: Any) -> Any:
    """Return an object whose initializer has not run."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


def test_quantization_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixin, "refused_on_all_ranks", contextlib.nullcontext)
    args = types.SimpleNamespace(model_init_kwargs={"quantization_config": {"load_in_4bit": True}})
    given = {"args": args, "model": "a/model", "quantization_config": {"load_in_4bit": True}}
    with pytest.raises(ModelRefusedError, match="it stands in model_init_kwargs too; give it once"):
        without_start(OtherOrder)._with_skeleton(given)


@pytest.mark.skipif(IS_4, reason="transformers 4.57 cannot quantize layer by layer")
def test_the_operations_of_4_bit_weights_count_once() -> None:
    """As in the model that is not quantized."""
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora: pip install terapipe_ds[qlora]")
    with torch.device("meta"):
        plain, model = (AutoModelForCausalLM.from_config(config_of("llama", 2)) for _ in range(2))
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantize(model)
    ids = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    for is_first in (True, False):
        stages = types.SimpleNamespace(is_first=is_first)
        counted = without_start(OtherOrder, model=model, _stages=stages).floating_point_ops(ids)
        assert counted == (6 * 10 * plain.num_parameters(exclude_embeddings=True) if is_first else 0)
    assert model.is_loaded_in_4bit


def test_a_training_forgets_the_sums_of_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_inner_training_loop", lambda self: None)
    loss = TokenLoss(keeps_sums=True)
    loss._sums[0].append(torch.ones(3))
    fields = {"_stages": without_start(Stages, _loss=loss), "_waiting": [(1, 2)], "_renew_config": lambda: None}
    without_start(OtherOrder, **fields)._inner_training_loop()
    assert loss.take_sums() == {} and not fields["_waiting"]


def test_sections_that_are_null_are_absent() -> None:
    args = types.SimpleNamespace(
        deepspeed={"terapipe": {"enabled": True, "slices": 2}, "pipeline": None, "tensor_parallel": None}
    )
    config = enabled_config(args)  # type: ignore[arg-type]
    assert config == {"terapipe": {"enabled": True, "slices": 2}}
    assert without_start(Stages, _raw=config)._wanted_sizes() == ("auto", 1)


def test_a_strategy_has_the_number_of_stages(tmp_path: Path) -> None:
    cluster = Cluster(device_card("h200"), 1, 4)
    strategy = plan_strategy("gpt3-1b", cluster, global_batch_size=8, sequence_length=1024, stages=2)
    path = tmp_path / "strategy.json"
    path.write_text(strategy.to_json())
    section = {"strategy": str(path)}
    for count in ("auto", 2):
        stages = without_start(Stages, _raw={"pipeline": {"stages": count}}, section=section)
        assert stages._wanted_topology().get_dim("pipe") == 2
    with pytest.raises(TeraPipeConfigError, match=r"pipeline.stages = 4, .* has 2: leave out pipeline.stages"):
        without_start(Stages, _raw={"pipeline": {"stages": 4}}, section=section)._wanted_topology()
