"""Test that only attention grows with the square of a sequence, and that positions which a model lacks are refused."""

import collections
from typing import Any

import pytest
import torch

from studies.long_context import counted, grown, window
from tests.distributed import engines
from tests.distributed.harness import rank_pool

SLICE, DOCUMENT = 8, 8
_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu_backward", "add_.Tensor")
"""Operations of full attention: gradients of all keys before a slice, and their addition to later slices' gradients."""


def counts_of(length: int, span: int | None, is_packed: bool) -> collections.Counter[str]:
    """Count what a step of sequences of that length does, in slices of one length, after a step that warms up."""
    positions: dict[str, Any] = {"positions": "learned", "max_sequence_length": length}
    layers = engines.gpt_layers("float32", num_layers=2, num_heads=2, num_kv_heads=2, hidden_size=8, **positions)
    section = engines.section(slices=length // SLICE, documents=1 if is_packed else "off")
    tokens, labels = engines.micro_batch(0, length, rows=1)
    place = (torch.arange(length) % DOCUMENT)[None]
    data = [((tokens, place) if is_packed else tokens, labels)]
    changes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    with engines.engine_of(layers, section, stages=1, **changes) as engine, window(span):
        engine.train_batch(iter(data))
        return counted(lambda: engine.train_batch(iter(data)))


def job_growth(span: int | None, is_packed: bool) -> dict[str, Any]:
    return grown(*(counts_of(length, span, is_packed) for length in (64, 128)), least=100)


@pytest.mark.parametrize(("span", "is_packed"), [(None, False), (8, False), (None, True)])
def test_only_attention_grows_with_the_square_of_a_sequence(span: int | None, is_packed: bool) -> None:
    """With a window, or documents of one length, nothing does: masks, positions, edges, headers, plans, Python."""
    found = rank_pool(1).run(job_growth, span=span, is_packed=is_packed)[0]
    is_full = span is None and not is_packed
    others = {name: counts for name, counts in found.items() if not is_full or not name.endswith(_ATTENTION)}
    assert others == {}
    assert bool(found) == is_full


def refused(build: Any, too_long: Any, right: Any) -> tuple[str, str]:
    """Return what a batch with too many positions raises; the next batch trains."""
    with build() as engine:
        said = engines.raised_by(lambda: engine.train_batch(iter([too_long] * 2)))
        evaluated = engines.raised_by(lambda: engine.eval_batch(iter([too_long] * 2)))
        assert evaluated == said and engine.global_steps == 0
        engine.train_batch(iter([right] * 2))
        assert engine.global_steps == 1
    return said


def job_refused(kind: str) -> tuple[str, str]:
    too_long, right = (engines.micro_batch(1, length, masked=False) for length in (70, 64))
    if kind == "GPT":
        layers = engines.gpt_layers("float32", positions="learned")
        return refused(lambda: engines.engine_of(layers, engines.section()), too_long, right)
    import terapipe_ds
    from tests.distributed.hugging_face_jobs import engine_of
    from tests.hugging_face_families import config_of

    module = terapipe_ds.from_config(config_of(kind), num_stages=2, dtype=torch.float32)
    return refused(lambda: engine_of(module, engines.section()), too_long, right)


@pytest.mark.parametrize("kind", ["GPT", "gpt2", "mpt"])
def test_positions_that_the_model_lacks_are_refused_before_a_slice_runs(kind: str) -> None:
    """On every rank alike, and the engine goes on; a layer in the middle of a batch would end the job."""
    pytest.importorskip("transformers") if kind != "GPT" else None
    for name, said in rank_pool(2).run(job_refused, kind=kind):
        assert "70 tokens" in said and "64" in said and "shorter" in said
        assert name in ("GPTConfigError", "ModelRefusedError", "BatchError")
