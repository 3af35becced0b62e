"""Test that adapters train beside 4-bit weights of bitsandbytes on stages as they do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")
pytest.importorskip("bitsandbytes", reason="needs the extra qlora: pip install terapipe_ds[qlora]")

from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_quantized import folders_of_adapters, refusals, train_quantized
from tests.hugging_face_families import IS_4

pytestmark = pytest.mark.skipif(IS_4, reason="transformers 4.57 cannot quantize layer by layer")
VERIFIED = {"verify": "first_batch", "recompute": "full", "offload_activations": True}


class TestQuantizedBases:
    @pytest.mark.parametrize(
        "given",
        [
            {"terapipe": {"slices": 1}},
            {"terapipe": {"slices": 4, "schedule": "seq1f1b-zb"}, "is_stored": True},
            {"terapipe": VERIFIED, "family": "gemma"},
        ],
        ids=["whole", "slices, split backwards, stored quantized", "tied, verify, recompute, offload"],
    )
    def test_adapters_equal_one_process(self, given: dict[str, Any], tmp_path: Path) -> None:
        """Losses, gradients and adapters to 1e-6; the frozen weights are equal bit for bit, and do not change."""
        given = {**given, "terapipe": engines.section(**{"verify": "off", **given["terapipe"]})}
        assert not engines.violations(rank_pool(2).run(train_quantized, folder=str(tmp_path), **given), 1e-6)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("layers", [None, [3]], ids=["everywhere", "last stage"])
    @pytest.mark.parametrize("compute", ["float32", "bfloat16"])
    def test_bf16_with_zero1(self, compute: str, layers: list[int] | None, tmp_path: Path) -> None:
        fields = {} if layers is None else {"layers_to_transform": layers, "target_modules": ["q_proj"]}
        given = {"is_bf16": True, "form": {"bnb_4bit_compute_dtype": compute}, "adapter": fields}
        section = engines.section(slices=[7, 3, 6], verify="off")
        errors = rank_pool(2).run(train_quantized, folder=str(tmp_path), terapipe=section, **given)
        assert not engines.violations(errors, 1e-2)

    @pytest.mark.full
    @pytest.mark.parametrize("family", ["gpt2", "qwen2"])
    def test_transposed_weights_and_biases(self, family: str, tmp_path: Path) -> None:
        given = {"family": family, "terapipe": engines.section(slices=[7, 3, 6], schedule="zbv"), "is_stored": True}
        given["adapter"] = {"target_modules": ["c_attn", "c_proj"] if family == "gpt2" else "all-linear"}
        assert not engines.violations(rank_pool(2).run(train_quantized, folder=str(tmp_path), **given), 1e-5)

    def test_what_is_saved_is_read(self, tmp_path: Path) -> None:
        """By peft, by stages, by other parts, and a checkpoint brings its quantized weights; from any form of base."""
        for found in rank_pool(2).run(folders_of_adapters, folder=str(tmp_path)):
            assert found["files"] == ["adapter_config.json", "adapter_model.safetensors"] and found["base"]
            assert "adapters are not added to quantized weights" in found["merge"]
            errors = [found[name] for name in ("peft", "again", "other", "moved", "skeleton")]
            assert max(errors) <= 1e-6, found

    def test_what_is_refused(self, tmp_path: Path) -> None:
        """On all ranks, before anything is read."""
        texts = {
            "nothing trained": "train adapters, adapter=LoraConfig()",
            "tensor ranks": "tensor-parallel ranks cannot divide them",
            "in memory": "its weights are quantized in memory: give its folder",
            "two": "give it to skeleton",
            "dora": "LoraConfig(use_dora=True) is not served",
            "bias": "LoraConfig(bias='all') is not served",
            "8 bits": "its weights are quantized (load_in_8bit)",
        }
        for found in rank_pool(2).run(refusals, folder=str(tmp_path)):
            assert found.keys() == texts.keys()
            assert not [case for case, text in texts.items() if text not in found[case]], found
