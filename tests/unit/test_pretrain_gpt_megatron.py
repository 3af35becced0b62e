"""examples/pretrain_gpt_megatron.py: what its options mean, and what it says where they are wrong."""

import json
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.test_examples import ROOT, example

pytest.importorskip("megatron.core", reason="needs the extra megatron")

CONFIG = ROOT / "configs" / "gpt_tp2_pp2.json"


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_megatron.py"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return example("megatron_arguments", monkeypatch)


@pytest.fixture
def pretrain(arguments: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("pretrain_gpt_megatron", monkeypatch)


def parsed(pretrain: ModuleType, *options: str, config: Path = CONFIG) -> Any:
    return pretrain.parse_arguments([f"--deepspeed_config={config}", *options])


def said(arguments: ModuleType, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        arguments.parse_arguments(options)
    assert ended.value.code == 2
    return capsys.readouterr().err


# -- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["{}-model-parallel-size", "{}-parallel"])
def test_both_names_of_parallel_sizes(pretrain: ModuleType, name: str) -> None:
    options = f"--{name} 2 --{name} 4 --local_rank=3".replace("{}", "tensor", 1).replace("{}", "pipeline")
    config = pretrain.transformer_config(parsed(pretrain, *options.split()))
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (2, 4)


def test_every_model_option_reaches_the_config(pretrain: ModuleType) -> None:
    options = """--num-layers 6 --hidden-size 96 --ffn-hidden-size 200 --num-attention-heads 6 --group-query-attention
        --num-query-groups 2 --kv-channels 24 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --qk-layernorm
        --disable-bias-linear --init-method-std 0.01 --use-cpu-initialization --hidden-dropout 0.1
        --attention-dropout 0.2 --transformer-impl local --recompute-granularity selective --recompute-modules mlp
        --tensor-parallel 2 --sequence-parallel"""
    config = pretrain.transformer_config(parsed(pretrain, *options.split()))
    expected = {
        "num_layers": 6, "hidden_size": 96, "ffn_hidden_size": 200, "num_attention_heads": 6, "num_query_groups": 2,
        "kv_channels": 24, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "qk_layernorm": True, "add_bias_linear": False,
        "init_method_std": 0.01, "use_cpu_initialization": True, "hidden_dropout": 0.1, "attention_dropout": 0.2,
        "transformer_impl": "local", "recompute_granularity": "selective", "recompute_modules": ["mlp"],
        "sequence_parallel": True, "params_dtype": torch.float32, "bf16": False,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_defaults(pretrain: ModuleType) -> None:
    config = pretrain.transformer_config(parsed(pretrain))
    assert config.activation_func is torch.nn.functional.gelu
    assert config.num_query_groups == config.num_attention_heads == 4
    assert (config.ffn_hidden_size, config.hidden_dropout, config.attention_dropout) == (512, 0, 0)
    alone = pretrain.transformer_config(parsed(pretrain, "--sequence-parallel"))  # as Megatron-LM examples give it
    assert not alone.sequence_parallel


def test_the_model_has_what_is_no_part_of_the_config(pretrain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.models import megatron

    built: dict[str, Any] = {}
    monkeypatch.setattr(megatron, "MegatronGPT", lambda config, **options: built.update(options))
    options = """--position-embedding-type rope --rotary-base 500000 --rotary-percent 0.5 --seed 7 --seq-length 256
        --max-position-embeddings 300 --tensor-parallel 2 --make-vocab-size-divisible-by 8"""
    pretrain.build_model(parsed(pretrain, *options.split()), vocab_size=257)
    rope = {"position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 0.5}
    sizes = {"vocab_size": 272, "max_sequence_length": 300}
    assert built == {**sizes, **rope, "share_embeddings_and_output_weights": True, "seed": 7}
    pretrain.build_model(parsed(pretrain, "--untie-embeddings-and-output-weights"), vocab_size=257)
    assert built["share_embeddings_and_output_weights"] is False
    assert (built["vocab_size"], built["max_sequence_length"]) == (384, 512)


@pytest.mark.parametrize(
    ("section", "dtype"),
    [({"bf16": {"enabled": True}}, torch.bfloat16), ({"fp16": {"enabled": True}}, torch.float16),
     ({"bf16": {"enabled": False}}, torch.float32)],
)  # fmt: skip
def test_precision_is_deepspeeds(
    pretrain: ModuleType, tmp_path: Path, section: dict[str, Any], dtype: torch.dtype
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(section))
    config = pretrain.transformer_config(parsed(pretrain, "--pipeline-parallel=2", config=file))
    assert config.params_dtype == config.pipeline_dtype == dtype
    assert (config.bf16, config.fp16) == (dtype == torch.bfloat16, dtype == torch.float16)


def test_documents_of_attention(arguments: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both, file = ("--reset-position-ids", "--reset-attention-mask"), tmp_path / "ds.json"
    assert parsed(arguments, *both).ds_config["terapipe"]["documents"] == 1
    assert "documents" not in parsed(arguments, both[0]).ds_config["terapipe"]
    for section, message in (({"enabled": False}, "needs an enabled terapipe section"),
                             ({"enabled": True, "documents": 0}, "sets terapipe.documents to 1")):  # fmt: skip
        file.write_text(json.dumps({"terapipe": section}))
        assert message in said(arguments, capsys, f"--deepspeed_config={file}", *both)


# -- what is wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ("--micro-batch-size 4", "set train_micro_batch_size_per_gpu in the DeepSpeed JSON"),
    ("--lr=1e-3", "--lr: set optimizer.params.lr in the DeepSpeed JSON"),
    ("--bf16 --clip-grad 1", "--bf16: set bf16.enabled in the DeepSpeed JSON; --clip-grad: set gradient_clipping"),
    ("--num-layer 4", "--num-layer: unknown; did you mean --num-layers?"),
    ("--seq-length 3", "4 slices cut at multiples of 1 tokens do not fit in a sequence of 3 tokens"),
    ("--tokenizer huggingface:gpt2", "needs --data-path"),
    ("--reset-attention-mask", "--reset-attention-mask needs --reset-position-ids"),
    ("--window-size 4,0", "--window-size: unknown"),
    ("--split 9,x", "argument --split: '9,x': give shares of training, validation and test"),
    ("--split 0,0", "argument --split"),
    ("--num-query-groups 2", "--num-query-groups needs --group-query-attention"),
    ("--hidden-size 0", "0 is not a number >= 1"),
    ("--eval-iters -1", "argument --eval-iters"),
    ("--seq-length 256 --max-position-embeddings 32", "--max-position-embeddings 32 is less than --seq-length 256"),
    ("--seq-length 263 --tensor-parallel 2 --sequence-parallel", "--seq-length 263 does not divide by 2"),
])  # fmt: skip
def test_wrong_options(arguments: ModuleType, capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    error = said(arguments, capsys, f"--deepspeed_config={CONFIG}", *options.split())
    assert error.startswith("pretrain_gpt_megatron.py: error: ")
    assert message in error
    assert len(error.splitlines()) == 1  # every rank of a machine could say it


def test_unreadable_configs(arguments: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"zero')
    for name in ("none.json", "half.json"):
        assert f"{name} cannot be read" in said(arguments, capsys, f"--deepspeed_config={tmp_path}/{name}")


def test_the_first_rank_speaks_first(
    arguments: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    for rank, expected in (("0", []), ("1", [15])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert "--x: unknown" in said(arguments, capsys, f"--deepspeed_config={CONFIG}", "--x")
        assert waits == expected


def test_ranks_that_do_not_divide_are_told_before_anything_else(
    arguments: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = said(arguments, capsys, f"--deepspeed_config={CONFIG}", "--tensor-parallel", "3")
    assert "4 ranks do not divide by --tensor-parallel 3 x --pipeline-parallel 1 = 3" in text
