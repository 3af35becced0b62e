"""Test that a patched code base like Megatron-DeepSpeed trains in slices as DeepSpeed's own engine trains it whole."""

import contextlib
import zlib
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import terapipe_ds
from tests import mini_megatron
from tests.distributed.engines import config, differences, reduce_in_fp64, section, train, violations
from tests.distributed.harness import rank_pool

LENGTH = 23
ATTEND = "megatron/model/transformer.py slicing"
EVERY_SLICE_ALIKE = """
def slice_weight(labels):
    return float(labels[1].numel())
slice_weight.__module__ = "terapipe_patch"
"""


def text(seed: int) -> dict[str, torch.Tensor]:
    """Two rows; the mask leaves out the first 9 tokens of both, so that a slice may count nowhere."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(2, LENGTH, generator=generator) > 0.3).double()
    mask[:, :9] = 0.0
    return {"text": torch.randint(31, (2, LENGTH + 1), generator=generator), "mask": mask}


def start(program: Any, args: Any, stages: int) -> Any:
    """As upstream: the model, `deepspeed.initialize` with nothing of ours, then the batch function."""
    program.utils.update_rotary_pos_emb(LENGTH)
    document = torch.arange(LENGTH) // args.document_tokens
    args.attn_mask = torch.ones(LENGTH, LENGTH).triu(1).bool() | (document != document[:, None])
    model = program.gpt_model.GPTModelPipe(num_stages=stages).double()
    model._megatron_batch_fn = program.pretrain_gpt.get_batch_pipe
    for name, parameter in model.named_parameters():  # named by the layer's place in the whole model
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator).double() * 0.3)
    engine = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=args.deepspeed_config_dict
    )[0]
    reduce_in_fp64(engine)
    engine.set_batch_fn(model._megatron_batch_fn)
    return engine


def trained(root: str, stages: int, terapipe: dict[str, Any] | None, document_tokens: int = LENGTH) -> tuple[str, Any]:
    ds_config = config() if terapipe is None else {**config(), "terapipe": terapipe}
    args = mini_megatron.arguments(LENGTH, deepspeed_config_dict=ds_config, document_tokens=document_tokens)
    with contextlib.ExitStack() as stack:
        stack.callback(terapipe_ds.unregister)
        program = stack.enter_context(mini_megatron.imported(Path(root), args))
        engine = start(program, args, stages)
        stack.callback(engine.destroy)
        return type(engine).__name__, train(engine, [[text(1), text(2)], [text(3), text(4)]])  # type: ignore[list-item]


def compare(root: str, stages: int, terapipe: dict[str, Any], **given: int) -> tuple[str, str, dict[str, float]]:
    stock, expected = trained(root, stages, None, **given)
    ours, run = trained(root, stages, terapipe, **given)
    return stock, ours, differences(run, expected)


def refusal(root: str, stages: int, **changes: Any) -> str:
    try:
        trained(root, stages, section(**changes))
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("changes", [{"slices": [7, 7, 7, 2]}, {"slices": [1, 14, 8], "schedule": "terapipe"}], ids=str)
def test_slices_train_as_the_whole_sequence(changes: dict[str, Any], tmp_path: Path) -> None:
    mini_megatron.write(tmp_path)
    told = rank_pool(2).run(compare, root=str(tmp_path), stages=2, terapipe=section(sliced_inputs=[0, 1], **changes))
    assert {names[:2] for names in told} == {("PipelineEngine", "TeraPipeEngine")}
    assert violations([errors for _, _, errors in told]) == {}


def test_slices_keep_to_the_documents_of_the_position_ids(tmp_path: Path) -> None:
    """DeepSpeed's own engine gets the mask of these documents; the refusal of --reset-attention-mask names this way."""
    mini_megatron.write(tmp_path)
    path = tmp_path / "pretrain_gpt.py"
    plain, restarted = "torch.arange(length).expand_as", "(torch.arange(length) % args.document_tokens).expand_as"
    assert plain in path.read_text()
    path.write_text(path.read_text().replace(plain, restarted))
    options = section(sliced_inputs=[0, 1], slices=[7, 7, 9], documents=1)
    told = rank_pool(2).run(compare, root=str(tmp_path), stages=2, terapipe=options, document_tokens=8)
    assert violations([errors for _, _, errors in told]) == {}


def test_without_the_weights_of_slices_it_does_not_train(tmp_path: Path) -> None:
    mini_megatron.write(tmp_path)
    path = tmp_path / "megatron/model/gpt_model.py"
    source = path.read_text()
    assert "= terapipe_patch.slice_weight," in source
    # by the helper's own name, so that the check at start passes
    path.write_text(EVERY_SLICE_ALIKE + source.replace("= terapipe_patch.slice_weight,", "= slice_weight,"))
    told, of_the_other = rank_pool(2).run(refusal, root=str(tmp_path), stages=2, slices=[7, 16])
    assert "\n  loss_fn: the loss " in told and "loss_fn.slice_weight(labels)" in told
    assert "first in loss_fn; the error of rank 0" in of_the_other


def test_a_missing_insertion_is_told_on_every_rank_before_training(tmp_path: Path) -> None:
    mini_megatron.write(tmp_path, without=[ATTEND])
    told = rank_pool(2).run(refusal, root=str(tmp_path), stages=2)
    assert len(told) == 2
    for problem in told:
        assert "megatron/model/transformer.py" in problem and "pretrain_gpt.py" not in problem


def test_an_insertion_in_a_branch_that_never_runs_stops_before_the_first_step(tmp_path: Path) -> None:
    """One stage: nobody waits for the rank that raises. Upstream's own attention takes the slices here, as its fused
    kernels would, which look at no mask."""
    mini_megatron.write(tmp_path)
    path = tmp_path / "megatron/model/transformer.py"
    source = path.read_text()
    for old, new in (
        ("if terapipe_patch.slicing(get_args()):", "if terapipe_patch.slicing(get_args()) and 0:"),
        ("masked_fill(attention_mask,", "masked_fill(attention_mask[: len(query_layer), : len(query_layer)],"),
    ):
        assert old in source
        source = source.replace(old, new)
    path.write_text(source)
    (told,) = rank_pool(1).run(refusal, root=str(tmp_path), stages=1)
    assert told.startswith("verify: ") and "(Layer): output of tokens" in told
    (told,) = rank_pool(1).run(refusal, root=str(tmp_path), stages=1, verify="off")
    assert "did not call sliced attention" in told and "transformer.py" in told
