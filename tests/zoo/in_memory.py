"""List changes that owners make to a model of transformers in memory before they pass it to `from_pretrained`.

With the defaults each model trains as its own class does in one process, or is refused before the first step.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import AutoModelForCausalLM

from tests.hugging_face_families import config_of

Change = Callable[[Any], Any]  # returns the model to pass, if it is another one
SEED, NUM_LAYERS = 11, 4


@dataclass(frozen=True)
class Kind:
    """Hold a change to a fresh model. `says`: the text that the refusal contains; empty if the model trains on."""

    change: Change
    says: str = ""
    family: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return the changed model; the same one each time."""
        config = config_of(self.family, NUM_LAYERS)
        for name, value in self.config.items():
            setattr(config, name, value)
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        changed = self.change(model)
        return changed if isinstance(changed, nn.Module) else model


# -- taken over ------------------------------------------------------------------------------------------------------


def _freeze(*words: str, but: str = "") -> Change:
    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            is_named = any(word in name for word in words)
            parameter.requires_grad_(bool(but and but in name) or not is_named)

    return freeze


def drop(probability: float) -> Change:
    def drop(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = probability
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = probability

    return drop


def _bias_of_experts(model: Any) -> None:
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    for bias in biases:
        bias.copy_(torch.linspace(-1.0, 1.0, len(bias)))


def adapters(change: Change = lambda _: None, **fields: Any) -> Change:
    def adapt(model: Any) -> Any:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **fields))
        change(model)
        return model

    return adapt


def _adapters_on_a_device(model: Any) -> Any:
    """Adapt a model that was loaded with a `device_map`, which peft notes in its layers."""
    model.hf_device_map = {"": "cpu"}
    return adapters()(model)


def _train_norms(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)


def _freeze_adapters_of_layer_0(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".layers.0." not in name)


def _add_and_delete(model: Any) -> None:
    model.add_adapter("second", LoraConfig(target_modules=["v_proj"]))
    model.delete_adapter("second")


def _used_and_changed(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)
    model.resize_token_embeddings(80, mean_resizing=False)
    model.config.pad_token_id = 5
    model(torch.ones(1, 4, dtype=torch.long), output_hidden_states=True)


DROPPING = {"embd_pdrop": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5}
TIED = {"tie_word_embeddings": True}
TRAINED: dict[str, Kind] = {
    "all but layer 0 frozen": Kind(_freeze("", but="layers.0.")),
    "tied embedding frozen": Kind(_freeze("embed_tokens"), config=TIED),
    "last stage frozen": Kind(_freeze("layers.2.", "layers.3.", "model.norm", "lm_head")),
    "embedding frozen, input_require_grads, checkpointing": Kind(
        lambda m: (_freeze("embed_tokens")(m), m.enable_input_require_grads(), m.gradient_checkpointing_enable())
    ),
    "dropout off around layers": Kind(drop(0.0), family="gpt2", config=DROPPING),
    "biases of experts": Kind(_bias_of_experts, family="deepseek_v3"),
    "angles, resized, padding token set later, after a forward": Kind(_used_and_changed),
    "adapters, those of layer 0 frozen": Kind(adapters(_freeze_adapters_of_layer_0)),
    "adapters and norms": Kind(adapters(_train_norms)),
    "adapters, with a device_map": Kind(_adapters_on_a_device),
    "adapters, dropout off, checkpointing": Kind(
        adapters(lambda m: (drop(0.0)(m), m.gradient_checkpointing_enable()), lora_dropout=0.5),
        config={"attention_dropout": 0.5},
    ),
}

# -- refused ---------------------------------------------------------------------------------------------------------


def _hook(*_: Any) -> None:
    """Do nothing; no check can know that."""


def _copy_layer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[-1]))
    model.model.layers[-1].self_attn.layer_idx = NUM_LAYERS
    model.config.num_hidden_layers = NUM_LAYERS + 1


def _set(path: str, value: Any) -> Change:
    def change(model: Any) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


def _call(path: str, method: str, *arguments: Any) -> Change:
    def change(model: Any) -> None:
        owner = model.get_parameter(path) if path.endswith("weight") else model.get_submodule(path)
        getattr(owner, method)(*arguments)

    return change


LAYER = "model.layers.0"
NOT_FRESH = "in memory is not what transformers makes of its config"
REFUSED: dict[str, Kind] = {
    "removed layer": Kind(lambda m: m.model.layers.__delitem__(1), "model.layers has 3 layers, in a fresh model 4"),
    "added layer": Kind(lambda m: m.model.layers.append(nn.Identity()) and None, "model.layers has 5 layers"),
    "copied layer": Kind(_copy_layer, "model.layers.4.self_attn.config.num_hidden_layers is 4, in a fresh model 5"),
    "another activation": Kind(_set(f"{LAYER}.mlp.act_fn", nn.GELU()), f"{LAYER}.mlp.act_fn is GELU"),
    "another field": Kind(_set(f"{LAYER}.input_layernorm.variance_epsilon", 0.1), "variance_epsilon is 0.1"),
    "another field in all layers": Kind(
        lambda m: [setattr(each.input_layernorm, "variance_epsilon", 0.1) for each in m.model.layers] and None,
        f"{LAYER}.input_layernorm.variance_epsilon (and 3 like it) is 0.1",
    ),
    "config changed later": Kind(lambda m: setattr(m.config, "rms_norm_eps", 0.1), "a fresh model 0.1"),
    "replaced module": Kind(_set(f"{LAYER}.mlp", nn.Identity()), f"{LAYER}.mlp is Identity, in a fresh model LlamaMLP"),
    "removed module": Kind(lambda m: delattr(m.model, "norm"), "model.norm is missing"),
    "added module": Kind(lambda m: m.model.add_module("extra", nn.Linear(2, 2)), "model.extra is Linear"),
    "removed bias": Kind(_set(f"{LAYER}.self_attn.q_proj.bias", None), "q_proj.bias is missing", "qwen2"),
    "added bias": Kind(
        _set(f"{LAYER}.mlp.up_proj.bias", nn.Parameter(torch.ones(64).double())),
        "up_proj.bias is ['Parameter', 64], in a fresh model missing",
    ),
    "added buffer": Kind(lambda m: m.model.register_buffer("extra", torch.ones(2)), "model.extra is a tensor"),
    "another shape": Kind(
        _set("lm_head.weight", nn.Parameter(torch.ones(65, 32).double())),
        "['Parameter', 65, 32], in a fresh model ['Parameter', 64, 32]",
    ),
    "parametrized": Kind(lambda m: weight_norm(m.model.layers[0].mlp.up_proj) and None, "ParametrizedLinear"),
    "forward hook": Kind(_call(f"{LAYER}.mlp", "register_forward_hook", _hook), f"{LAYER}.mlp.(hooks) is"),
    "forward pre-hook": Kind(_call("model.norm", "register_forward_pre_hook", _hook), "_hook"),
    "backward hook": Kind(_call("model.norm", "register_full_backward_hook", _hook), "_hook"),
    "hook of a parameter": Kind(_call("lm_head.weight", "register_hook", _hook), "lm_head.(hooks of parameters)"),
    "hook of a gradient": Kind(_call("lm_head.weight", "register_post_accumulate_grad_hook", _hook), "lm_head.(hooks"),
    "patched method": Kind(
        lambda m: setattr(m.model.layers[2].mlp, "forward", _hook), "model.layers.2.mlp.forward is _hook"
    ),
    "patched forward": Kind(
        lambda m: setattr(m, "forward", functools.partial(m.forward, logits_to_keep=4)), "forward is"
    ),
    "own loss": Kind(lambda m: setattr(m, "loss_function", _hook), "_loss_function is _hook"),
    "tied by hand": Kind(
        lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), "are one tensor in memory"
    ),
    "tied by memory": Kind(
        lambda m: setattr(m.lm_head.weight, "data", m.model.embed_tokens.weight.data),
        "lm_head.weight are one tensor in memory",
    ),
    "tied layers": Kind(
        lambda m: setattr(m.model.layers[1], "mlp", m.model.layers[0].mlp),
        "model.layers.1.mlp.gate_proj.weight are one tensor",
    ),
    "untied by hand": Kind(
        lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.detach().clone())),
        "are one tensor in a fresh model, and not in memory",
        config=TIED,
    ),
    "checkpointing in some layers": Kind(
        lambda m: (m.gradient_checkpointing_enable(), setattr(m.model.layers[1], "gradient_checkpointing", False)),
        "gradient checkpointing is on in 4 of 5 modules",
    ),
    "checkpointing by hand": Kind(
        lambda m: m._set_gradient_checkpointing(True, _hook), "gradient checkpointing is by _hook"
    ),
    "dropped layers": Kind(lambda m: setattr(m.model.decoder, "layerdrop", 0.5), "layerdrop is 0.5", "opt"),
    "adapters scaled": Kind(
        adapters(
            lambda m: m.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").set_scale("default", 3.0)
        ),
        "q_proj.scaling.default is 6.0",
    ),
    "adapters deleted": Kind(
        adapters(_add_and_delete), "v_proj (and 3 like it) is peft.tuners.lora.layer.Linear, in a fresh model torch.nn."
    ),
    "adapters disabled": Kind(adapters(lambda m: m.disable_adapter_layers()), "_disable_adapters (and 3 like it)"),
}
# Refused in other words.
UNTRAINABLE: dict[str, Kind] = {
    "all frozen": Kind(_freeze(""), "no parameter of the model requires a gradient"),
    "compiled": Kind(torch.compile, "a OptimizedModule is no model of transformers"),
    "base model": Kind(lambda m: m.model, "LlamaModel is not the causal language model of a LlamaConfig"),
    "own class": Kind(
        lambda m: setattr(m, "__class__", type("Mine", (type(m),), {})), "Mine is not the causal language model"
    ),
    "add_adapter": Kind(lambda m: setattr(m, "peft_config", {"default": 1}), "get_peft_model(model, config)"),
    "meta": Kind(lambda m: m.to("meta"), "device meta"),
}
