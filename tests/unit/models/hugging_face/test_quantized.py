"""Scales of 4-bit weights in folders and checkpoints: native code never gets wrong ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the extra qlora: pip install terapipe_ds[qlora]")

import torch
from bitsandbytes.functional import QuantState
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers import __version__ as installed

from terapipe_ds.models.hugging_face import ModelRefusedError
from terapipe_ds.models.hugging_face.create import model_without_weights
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.layers import Blueprint, Piece
from terapipe_ds.models.hugging_face.module import HuggingFaceModule
from terapipe_ds.models.hugging_face.weights.quantized import ask_for
from terapipe_ds.models.hugging_face.weights.stored import StoredWeights
from terapipe_ds.models.hugging_face.weights.unread import read
from tests.hugging_face_families import config_of

pytestmark = pytest.mark.skipif(installed.startswith("4."), reason="4-bit layers need transformers 5")
FORM = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
LAST, HELD = "model.layers.1", "held.0"
WEIGHT = "mlp.up_proj.weight"  # of 64 times 32 numbers, in 32 blocks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a small model, with a folder "quantized" in it."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config_of("llama", 2)).save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**FORM))
    theirs.save_pretrained(folder / "quantized")
    return folder


def piece_of(folder: Path, **form: Any) -> Piece:
    """Return the last decoder layer of a folder, with values, quantized as the arguments say."""
    config = AutoConfig.from_pretrained(folder)
    ask_for(form, config)
    outline, model = (model_without_weights(config, torch.float32) for _ in range(2))
    made = Outline(outline)
    piece = Piece(Blueprint(made, StoredWeights(folder, model, made)), [LAST])
    read(list(piece.parameters()))
    return piece


def packed(**fields: Any) -> Tensor:
    """Return what a file says of a weight, with some fields of a stranger."""
    state = QuantState(
        torch.zeros(1), torch.Size((64, 32)), torch.zeros(16), 64, "nf4", torch.float32,
        torch.zeros(()), QuantState(torch.zeros(1), code=torch.zeros(256), blocksize=256, dtype=torch.float32),
    )  # fmt: skip
    for name, value in fields.items():
        setattr(state, name, value)
    return next(each for key, each in state.as_dict(packed=True).items() if key.startswith("quant_state."))


MAP, SCALES, STATE = "quant_map", "absmax", "quant_state.bitsandbytes__nf4"
HOSTILE: dict[str, dict[str, Callable[[Tensor], Tensor | None]]] = {
    "few scales": {SCALES: lambda old: old[:1].clone()},
    "many scales": {SCALES: lambda old: torch.cat([old, old])},
    "scales of another dtype": {SCALES: lambda old: old.float()},
    "few scales of scales": {"nested_absmax": lambda old: old[:0].clone()},
    "a short map": {MAP: lambda old: old[:4].clone()},
    "a map of bytes": {MAP: lambda old: old.to(torch.uint8)},
    "a short nested map": {"nested_quant_map": lambda old: old[:16].clone()},
    "huge blocks": {STATE: lambda _: packed(blocksize=2**40)},
    "blocks of nothing": {STATE: lambda _: packed(blocksize=0)},
    "another shape": {STATE: lambda _: packed(shape=torch.Size((64, 64)))},
    "another kind": {STATE: lambda _: packed(quant_type="int8")},
    "another dtype": {STATE: lambda _: packed(dtype=torch.int64)},
    "no JSON": {STATE: lambda old: torch.zeros_like(old)},
    "no scales": {SCALES: lambda _: None},
    "no map": {MAP: lambda _: None},
    "nothing beside it": dict.fromkeys((SCALES, MAP, STATE, "nested_absmax", "nested_quant_map"), lambda _: None),
}


def changed(tensors: dict[str, Tensor], weight: str, changes: dict[str, Callable[[Tensor], Tensor | None]]) -> Any:
    new = {key: change(tensors[key]) for key, change in ((f"{weight}.{k}", c) for k, c in changes.items())}
    return {key: each for key, each in (tensors | new).items() if each is not None}


def test_packed_fields_are_those_of_the_file(base: Path) -> None:
    """Without changes the hostile files would be valid."""
    stored = load_file(base / "quantized/model.safetensors")
    of_weight = {key: each for key, each in stored.items() if key.startswith(f"{LAST}.{WEIGHT}.")}
    made = {key.removeprefix(f"{LAST}.{WEIGHT}."): each for key, each in of_weight.items()} | {STATE: packed()}
    scales = QuantState.from_dict(made, torch.device("cpu"))
    assert scales.shape == (64, 32) and scales.blocksize == 64 and scales.state2.blocksize == 256


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_has_scales_that_fit_each_weight(name: str, base: Path, tmp_path: Path) -> None:
    stored = load_file(base / "quantized/model.safetensors")
    weights = changed(stored, f"{LAST}.{WEIGHT}", HOSTILE[name])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.from_pretrained(base / "quantized").save_pretrained(tmp_path)
    with pytest.raises(ModelRefusedError, match=f"cannot be converted.*{WEIGHT}|for {LAST}.{WEIGHT}, or no scales"):
        piece_of(tmp_path)


@pytest.mark.parametrize("name", [*HOSTILE, "one scale for all"])
def test_a_checkpoint_has_scales_that_fit_each_weight(name: str, base: Path) -> None:
    piece = piece_of(base, **FORM)
    changes = HOSTILE.get(name) or {SCALES: lambda old: old[:1].expand(len(old))}  # native code knows no strides
    state = changed(dict(piece.state_dict()), f"{HELD}.{WEIGHT}", changes)
    with pytest.raises(ModelRefusedError, match=f"no scales, or none that fit, for {HELD}.{WEIGHT}: save it again"):
        piece.load_state_dict(state)


def values_of(piece: Piece) -> Tensor:
    layer = piece.held[0].mlp.up_proj
    return layer(torch.eye(layer.in_features))


def test_a_checkpoint_restores_weights_and_scales(base: Path) -> None:
    """Over other ones, also where only the saved ones are quantized twice."""
    saved, other = piece_of(base, **FORM), piece_of(base, **FORM | {"bnb_4bit_use_double_quant": False})
    assert not torch.equal(values_of(saved), values_of(other))
    other.load_state_dict(saved.state_dict())
    assert torch.equal(values_of(saved), values_of(other))


def test_a_checkpoint_of_another_form_is_refused(base: Path) -> None:
    saved, other = piece_of(base, **FORM), piece_of(base, **FORM | {"bnb_4bit_quant_type": "fp4"})
    with pytest.raises(ModelRefusedError, match="as nf4 in blocks of 64, and the model as fp4 in blocks of 64: give"):
        other.load_state_dict(saved.state_dict())


def test_scales_without_their_weights_are_left_alone(base: Path) -> None:
    """As in checkpoints that earlier versions saved without frozen weights."""
    saved, other = piece_of(base, **FORM), piece_of(base, **FORM | {"bnb_4bit_quant_type": "fp4"})
    before, state = values_of(other), saved.state_dict()
    frozen = [name for name, each in saved.named_parameters() if not each.requires_grad]
    state = {key: each for key, each in state.items() if key not in frozen}
    assert f"{HELD}.{WEIGHT}.{SCALES}" in state
    found = other.load_state_dict(state, strict=False)
    assert torch.equal(values_of(other), before) and not found.unexpected_keys


def test_a_save_without_frozen_weights_leaves_out_their_scales(base: Path) -> None:
    piece = piece_of(base, **FORM)
    module = object.__new__(HuggingFaceModule)
    left_out = module._get_frozen_parameter_names(piece)
    trained = {name for name, each in piece.named_parameters() if each.requires_grad}
    assert f"{HELD}.{WEIGHT}.{SCALES}" in left_out and trained
    assert set(piece.state_dict()) - set(left_out) == trained
