"""Keep frozen weights in the 4-bit form of bitsandbytes; transformers and peft do all work on this form.

transformers replaces the linear layers of a model, and quantizes weights as a stage reads them, or reads them from a
folder that has them quantized. peft puts adapters beside such layers. bitsandbytes multiplies by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe_ds.models.hugging_face.refusals import ModelRefusedError
from terapipe_ds.models.hugging_face.weights.unread import read

if TYPE_CHECKING:
    from transformers.quantizers import HfQuantizer


_CANNOT = {
    "quantized": "its weights are stored quantized, as its config describes: leave out quantization_config",
    "trained": "its weights are quantized, and cannot train: train adapters, adapter=LoraConfig()",
    "copied": "its weights are quantized in memory: give its folder and the same quantization_config to "
    "terapipe_ds.from_pretrained or terapipe_ds.skeleton",
    "drawn": "its config has a quantization_config, and random weights are not quantized: remove it from the config, "
    "or read a folder by from_pretrained",
    "divided": "its weights are quantized, and tensor-parallel ranks cannot divide them: give a topology without the "
    "axis 'model', or weights that are not quantized",
}


def ask_for(quantization: Any, config: PretrainedConfig) -> None:
    """Have the config of a model say that its weights are to be quantized, unless it says that they are.

    Raises:
        ModelRefusedError: they are quantized in a way beside which stages train no adapters, or bitsandbytes is absent.
    """
    if quantization:
        refuse_quantized(config, "quantized")
        from transformers.quantizers import AutoQuantizationConfig  # which imports the code of all methods

        is_dict = isinstance(quantization, Mapping)
        config.quantization_config = AutoQuantizationConfig.from_dict(dict(quantization)) if is_dict else quantization
    if is_quantized_by(config):
        _quantizer_of(config)


def is_quantized_by(config: PretrainedConfig) -> bool:
    """Return whether the weights of a model with this config are quantized."""
    return getattr(config, "quantization_config", None) is not None


def refuse_quantized(config: PretrainedConfig, how: str) -> None:
    """Raise ModelRefusedError if the weights of a model are quantized, and cannot be so (a key of `_CANNOT`)."""
    if is_quantized_by(config):
        raise ModelRefusedError(_CANNOT[how])


def quantize(model: PreTrainedModel) -> None:
    """Replace the layers of a model without weights that its config says are quantized, as transformers does."""
    if not is_quantized_by(model.config):
        return
    quantizer = _quantizer_of(model.config)
    from transformers.modeling_utils import local_torch_dtype  # transformers 4, refused above, has none

    with local_torch_dtype(model.dtype):  # of the biases of the new layers
        quantizer.preprocess_model(model, dtype=model.dtype, device_map=None)
    model.hf_quantizer, model.is_loaded_in_4bit = quantizer, True  # peft reads the second one
    for part in model.modules():
        # in evaluation on a CPU it would pack weights in place into a form that has no backward
        if getattr(part, "support_avx512bf16_for_cpu", False):
            part.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _quantizer_of(config: PretrainedConfig) -> HfQuantizer:
    from transformers.quantizers.auto import AutoHfQuantizer

    # a config in a file is a dict, and then the weights beside it are quantized
    asked = config.quantization_config
    is_stored = isinstance(asked, Mapping)
    _check(asked if is_stored else asked.to_dict())
    try:
        quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=is_stored)
        quantizer.validate_environment()
        if not hasattr(quantizer, "get_quantize_ops"):
            raise ImportError("transformers 4 cannot quantize layer by layer")
    except ImportError as error:
        raise ModelRefusedError(f"its weights are quantized, and {error}: pip install 'terapipe_ds[qlora]'") from error
    return quantizer


def _check(fields: Mapping[str, Any]) -> None:
    """Raise ModelRefusedError for a kind of quantization beside which stages cannot train adapters."""
    if fields.get("quant_method") != "bitsandbytes" or not fields.get("load_in_4bit"):
        way = "load_in_8bit" if fields.get("load_in_8bit") else f"quant_method {fields.get('quant_method')!s}"
        raise ModelRefusedError(
            f"its weights are quantized ({way}), and stages train adapters only beside 4-bit weights of bitsandbytes "
            "(BitsAndBytesConfig(load_in_4bit=True)): give the folder of the original weights"
        )
    if fields.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise ModelRefusedError(
            f"bnb_4bit_quant_storage={fields['bnb_4bit_quant_storage']!r} is for FSDP, and a cast of the model would "
            "change the packed weights: leave it out"
        )
    if fields.get("llm_int8_enable_fp32_cpu_offload"):
        raise ModelRefusedError("llm_int8_enable_fp32_cpu_offload needs a device_map, which stages lack: leave it out")


def is_quantized(tensor: Any) -> bool:
    """Return whether a parameter is the weight of a 4-bit layer, with values or without."""
    return hasattr(tensor, "bnb_quantized")


def without_values(old: nn.Parameter, owner: nn.Module) -> nn.Parameter:
    """Return a parameter like `old`, which has memory on the CPU for its values, and is a weight of `owner`."""
    if not is_quantized(old):
        return nn.Parameter(torch.empty_like(old, device="cpu"), old.requires_grad)
    # two numbers in a byte; a cast or a move must not quantize this
    memory = torch.empty((old.numel() + 1) // 2, 1, dtype=torch.uint8, device="cpu")
    settings = {**vars(old), "bnb_quantized": True, "module": owner}
    quantized: nn.Parameter = type(old)(memory, requires_grad=False, **settings)  # type: ignore[call-arg]
    return quantized


def can_take(value: Tensor, read_value: Tensor) -> bool:
    """Return whether the values that were read fit the parameter `value`."""
    if read_value.is_meta or read_value.shape != value.shape:
        return False
    scales = getattr(read_value, "quant_state", None)
    return not is_quantized(value) or (read_value.dtype is torch.uint8 and _fit(scales, value.module))  # type: ignore[attr-defined]


def _fit(scales: Any, owner: Any) -> bool:
    """Return whether scales fit a weight of this size: native code reads as many as the size requires."""
    shape, nested = (owner.out_features, owner.in_features), getattr(scales, "state2", None)
    if scales is None or scales.quant_type not in ("nf4", "fp4") or scales.shape != shape:
        return False
    dtypes = torch.float32, torch.float16, torch.bfloat16
    is_fit = scales.dtype in dtypes and _has(scales, math.prod(shape), 16, dtypes[0] if nested is None else torch.uint8)
    return is_fit and (nested is None or _has(nested, scales.absmax.numel(), 256, torch.float32))


def _has(scales: Any, count: int, codes: int, dtype: torch.dtype) -> bool:
    """Return whether there is a scale for each block of `count` numbers, and the table of codes is whole."""
    size = scales.blocksize
    blocks = -(count // -size) if type(size) is int and size in [2**power for power in range(5, 13)] else -1
    wanted = (scales.absmax, dtype, blocks), (scales.code, torch.float32, codes)
    is_plain = all(each.layout is torch.strided and each.is_contiguous() for each, *_ in wanted)
    return is_plain and all(each.dtype is kind and each.numel() == length for each, kind, length in wanted)


def take(value: Tensor, read_value: Tensor) -> None:
    """Give a parameter the values that were read."""
    if not is_quantized(value):
        value.copy_(read_value)  # out of the file, whose memory is mapped
        return
    owner = value.module  # type: ignore[attr-defined]
    value.data = read_value.data
    vars(value).update(vars(read_value), module=owner)
    owner.quant_state = value.quant_state  # type: ignore[attr-defined]


def take_scales(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Take the scales of quantized weights out of a state dict, whose other values torch loads.

    bitsandbytes saves them beside a weight, but does not load them. Raises ModelRefusedError if they do not fit.
    """
    for name, part in module.named_modules(prefix=prefix.removesuffix(".")):
        weight, key = part._parameters.get("weight"), f"{name}.weight"
        scales = {each.removeprefix(f"{key}."): state.pop(each) for each in list(state) if each.startswith(f"{key}.")}
        # without the weight in the state, the scales belong to other codes than the module has
        if weight is not None and is_quantized(weight) and key in state:
            read([weight])
            weight.quant_state = part.quant_state = _loaded(scales, weight, part, key)  # type: ignore[attr-defined]


def _loaded(scales: dict[str, Any], weight: Tensor, owner: nn.Module, key: str) -> Any:
    own, loaded, cause = weight.quant_state, None, None  # type: ignore[attr-defined]
    try:
        loaded = type(own).from_dict(scales, device=weight.device)
    except Exception as error:  # bitsandbytes checks little of what a file says
        cause = error
    if loaded is None or not _fit(loaded, owner):
        raise ModelRefusedError(f"the checkpoint has no scales, or none that fit, for {key}: save it again") from cause
    saved, present = (f"{each.quant_type} in blocks of {each.blocksize}" for each in (loaded, own))
    if saved != present:
        raise ModelRefusedError(
            f"the checkpoint has {key} as {saved}, and the model as {present}: give its quantization_config"
        )
    return loaded
