"""Keep frozen weights in the 4-bit form of bitsandbytes; transformers and peft do all work on this form.

transformers replaces the linear layers of a model, and quantizes weights as a stage reads them, or reads them from a
folder that has them quantized. peft puts adapters beside such layers. bitsandbytes multiplies by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from terapipe_ds.models.hugging_face.refusals import ModelRefusedError
from terapipe_ds.models.hugging_face.weights.unread import read

if TYPE_CHECKING:
    from transformers.quantizers import HfQuantizer


def ask_for(quantization: Any, config: PretrainedConfig) -> None:
    """Have the config of a model say that its weights are to be quantized, unless it says that they are.

    Raises:
        ModelRefusedError: they are quantized in a way beside which stages train no adapters, or bitsandbytes is absent.
    """
    if quantization:
        if is_quantized_by(config):
            raise ModelRefusedError(
                "its weights are stored quantized, as its config describes: leave out quantization_config"
            )
        from transformers.quantizers import AutoQuantizationConfig  # which imports the code of all methods

        is_dict = isinstance(quantization, Mapping)
        config.quantization_config = AutoQuantizationConfig.from_dict(dict(quantization)) if is_dict else quantization
    if is_quantized_by(config):
        _quantizer_of(config)


def is_quantized_by(config: PretrainedConfig) -> bool:
    """Return whether the weights of a model with this config are quantized."""
    return getattr(config, "quantization_config", None) is not None


def require_adapters(config: PretrainedConfig, adapter: object) -> None:
    """Raise ModelRefusedError if weights are quantized, and no adapters would train beside them."""
    if adapter is None and is_quantized_by(config):
        raise ModelRefusedError("its weights are quantized, and cannot train: train adapters, adapter=LoraConfig()")


def require_stored(config: PretrainedConfig, source: object) -> None:
    """Raise ModelRefusedError if the weights are quantized in memory; `source` is the folder of a skeleton."""
    if source is None and is_quantized_by(config):
        raise ModelRefusedError(
            "its weights are quantized in memory: give its folder and the same quantization_config to "
            "terapipe_ds.from_pretrained or terapipe_ds.skeleton"
        )


def refuse_random_weights(config: PretrainedConfig) -> None:
    """Raise ModelRefusedError if the config asks for quantized weights, and there are none to read."""
    if is_quantized_by(config):
        raise ModelRefusedError(
            "its config has a quantization_config, and random weights are not quantized: remove it from the config, or "
            "read a folder by from_pretrained"
        )


def refuse_tensor_ranks(model: PreTrainedModel) -> None:
    """Raise ModelRefusedError if weights are quantized: they have no shares for tensor-parallel ranks."""
    if is_quantized_by(model.config):
        raise ModelRefusedError(
            "its weights are quantized, and tensor-parallel ranks cannot divide them: give a topology without the axis "
            "'model', or weights that are not quantized"
        )


def quantize(model: PreTrainedModel) -> None:
    """Replace the layers of a model without weights that its config says are quantized, as transformers does."""
    if not is_quantized_by(model.config):
        return
    from transformers.modeling_utils import local_torch_dtype

    quantizer = _quantizer_of(model.config)
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
    owner = value.module if is_quantized(value) else None  # type: ignore[attr-defined]
    return owner is None or read_value.quant_state.shape == (owner.out_features, owner.in_features)  # type: ignore[attr-defined]


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

    bitsandbytes saves them beside a weight, but does not load them.
    """
    for name, part in module.named_modules(prefix=prefix.removesuffix(".")):
        weight = part._parameters.get("weight")
        beside = f"{name}.weight."
        scales = {key.removeprefix(beside): state.pop(key) for key in list(state) if key.startswith(beside)}
        if weight is not None and is_quantized(weight) and scales:
            read([weight])
            loaded = type(weight.quant_state).from_dict(scales, device=weight.device)  # type: ignore[attr-defined]
            weight.quant_state = part.quant_state = loaded  # type: ignore[attr-defined, assignment]
