"""Test models of transformers with dropout: recomputed forwards repeat the first ones' dropout, evaluation has none."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

import terapipe_ds
from tests.distributed import engines
from tests.distributed.cases import relative_error, worst_error
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_jobs import batches, engine_of, refusal_of, tuples, ways_of
from tests.hugging_face_families import VOCAB_SIZE, config_of

DROPPING: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "llama": {"attention_dropout": 0.2},
    "bloom": {"attention_dropout": 0.2, "hidden_dropout": 0.1},  # by a cache
    "opt": {"attention_dropout": 0.1, "dropout": 0.1},
}


def evaluated_and_trained(family: str, fields: dict[str, float], checkpointing: str) -> tuple[float, engines.Run, Any]:
    config = config_of(family)
    for name, value in fields.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    module = terapipe_ds.from_config(config, num_stages=2, dtype=torch.float32)
    data = tuples(module, batches(VOCAB_SIZE))
    section = engines.section(slices=[7, 3, 6], verify="off")
    with engine_of(module, section, **engines.CHECKPOINTING[checkpointing]) as engine:
        evaluated = float(engine.eval_batch(iter(data[0])))
        torch.manual_seed(7 + engine.global_rank)
        return evaluated, engines.train(engine, data), ways_of(module)


def dropping(family: str, checkpointing: str) -> dict[str, Any]:
    """Return the differences on this rank between a run that recomputes, one that does not, and one without dropout."""
    dry, without, ways = evaluated_and_trained(family, dict.fromkeys(DROPPING[family], 0.0), "off")
    plain, kept, _ = evaluated_and_trained(family, DROPPING[family], "off")
    again, recomputed, _ = evaluated_and_trained(family, DROPPING[family], checkpointing)
    return {
        "evaluation": max(relative_error(plain, dry), relative_error(again, dry)),
        "loss": max(relative_error(a, b) for a, b in zip(recomputed.returned, kept.returned, strict=True)),
        "gradient": max(worst_error(a, b).error for a, b in zip(recomputed.gradients, kept.gradients, strict=True)),
        "dropped": relative_error(kept.returned[0], without.returned[0]),
        "ways": ways,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", ["non_reentrant", "reentrant"])
@pytest.mark.parametrize("family", DROPPING)
def test_a_recomputed_forward_drops_the_same(family: str, checkpointing: str) -> None:
    for found in rank_pool(2).run(dropping, family=family, checkpointing=checkpointing):
        assert found["evaluation"] <= 1e-6, "dropout is for training"
        assert max(found["loss"], found["gradient"]) <= 1e-5, "a mask is replayed"
        assert found["dropped"] >= 1e-5, "there is dropout"
        assert all(way == ("slow" if family == "bloom" else "fast") for way in found["ways"])


def test_layers_that_are_dropped_whole_are_refused() -> None:
    for kind, text in rank_pool(2).run(refusal_of, family="opt", layerdrop=0.1):
        assert kind == "ModelRefusedError" and "layerdrop is 0.1" in text and "Set it to 0" in text
