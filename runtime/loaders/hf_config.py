"""config.json of a Hugging Face folder as a ModelConfig.

Names, defaults and meanings are those of transformers' configuration classes
(https://github.com/huggingface/transformers/tree/main/src/transformers/models); files on the Hub leave out what
equals the default, so the defaults are part of the format. What transformers would ignore and other engines would
not, is refused: a wrong guess would serve plausible nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from device.errors import LoadError, UnsupportedModel
from runtime.loaders.fields import MAX_LAYERS, Fields
from runtime.model_config import Activation, ModelConfig, supported, unique_ropes
from runtime.rope import RopeConfig, rope_from_hf

_CAUSAL_LM = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = {"float16", "bfloat16", "float32", "float64"}
# Options that change what the model computes: (key, value at which it does nothing).
_REFUSED: tuple[tuple[str, Any], ...] = (
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("partial_rotary_factor", 1.0),
    ("rotary_pct", 1.0),
    ("use_bidirectional_attention", False),
    ("is_causal", True),
    ("is_encoder_decoder", False),
    ("add_cross_attention", False),
    ("use_mrope", False),
    ("alibi", False),
    ("use_qk_norm", False),
    ("attention_chunk_size", None),
    ("no_rope_layers", None),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("embedding_multiplier", 1.0),
    ("residual_multiplier", 1.0),
    ("attention_multiplier", None),
)
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_num_experts")


def model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
    """See ModelConfig.from_hf."""
    architecture = _architecture(config)
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise LoadError(f"config.json: text_config must be an object, not {type(nested).__name__}")
    text = nested if nested is not None else config
    for part in (config, text):
        _refuse(part, architecture)
    values = dict(_DEFAULTS[architecture])
    if nested is not None and config.get("tie_word_embeddings") is not None:
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    # A key that is there with null keeps its null: sliding_window=null means none, not the default.
    values.update(text)
    fields = Fields(values, "config.json")
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    head_dim = _head_dim(fields, hidden, heads)
    types = _layer_types(fields, architecture, layers)
    ropes, rope_of_layer = unique_ropes(_ropes(fields, architecture, head_dim, types))
    attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=_max_position(fields, ropes),
        tied=fields.flag("tie_word_embeddings", False),
        windows=_windows(fields, architecture, types),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        attention_scale=_attention_scale(fields, architecture, head_dim),
        # Qwen2 always has biases on q, k and v, Mistral never; neither class reads attention_bias.
        qkv_bias=architecture == "qwen2" or (architecture != "mistral" and attention_bias),
        o_bias=architecture not in ("qwen2", "mistral") and attention_bias,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=architecture in ("qwen3", "gemma3"),
        activation=_activation(fields, architecture),
        post_norms=architecture == "gemma3",
        embed_scale=float(np.sqrt(np.float32(hidden))) if architecture == "gemma3" else 1.0,
        eos_ids=_end_ids(config, text, generation),
        bos_id=_first_id(text, config),
        dtype=_dtype(config, text),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or any(not isinstance(c, str) for c in classes):
        raise LoadError(f"config.json: architectures must be a list of names, not {classes!r}")
    if model_type is None and not classes:
        raise LoadError("config.json has neither model_type nor architectures; is this a model's folder?")
    unknown = [c for c in classes if c not in _CAUSAL_LM]
    if model_type is not None and model_type not in _MODEL_TYPES:
        raise UnsupportedModel(
            f"model_type {model_type!r} ({', '.join(classes) or 'no class'}) is not supported; supported: {supported()}"
        )
    if unknown:
        raise UnsupportedModel(f"architecture {', '.join(unknown)} is not supported; supported: {supported()}")
    found = {_CAUSAL_LM[c] for c in classes} | ({_MODEL_TYPES[model_type]} if model_type is not None else set())
    if len(found) > 1:
        raise LoadError(f"config.json contradicts itself: model_type {model_type!r}, architectures {classes}")
    return str(found.pop())


def _refuse(part: Mapping[str, Any], architecture: str) -> None:
    quantization = part.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModel(
            f"quantization_config with quant_method {method!r} is not supported yet; "
            "use the unquantised checkpoint or a GGUF file"
        )
    if part.get("compression_config"):
        raise UnsupportedModel("compression_config is not supported yet; use the unquantised checkpoint or a GGUF file")
    for key in _EXPERT_KEYS:
        count = part.get(key)
        if isinstance(count, (int, float)) and count > 0:
            raise UnsupportedModel(f"{key}={count}: mixture-of-experts models are not supported (model {architecture})")
    for key, neutral in _REFUSED:
        value = part.get(key)
        if value is not None and value != neutral:
            raise UnsupportedModel(f"config.json: {key}={value!r} is not supported (model {architecture})")


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    if hidden % heads:
        raise LoadError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}, and no head_dim"
        )
    return hidden // heads


def _activation(fields: Fields, architecture: str) -> Activation:
    key = "hidden_activation" if architecture == "gemma3" else "hidden_act"
    name = fields.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"config.json: {key}={name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _attention_scale(fields: Fields, architecture: str, head_dim: int) -> float:
    if architecture == "gemma3":
        return float(fields.number("query_pre_attn_scalar") ** -0.5)
    return float(head_dim**-0.5)


def _layer_types(fields: Fields, architecture: str, layers: int) -> list[str]:
    """Per layer ``full_attention`` or ``sliding_attention``."""
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise LoadError(f"config.json: layer_types must be a list with one entry for each of {layers} layers")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModel(f"config.json: layer type {kind!r} is not supported (full and sliding are)")
        return [str(kind) for kind in types]
    if architecture == "gemma3":
        key = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
        pattern = fields.integer(key, 6)
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    if architecture == "mistral":
        return ["sliding_attention" if fields.has("sliding_window") else "full_attention"] * layers
    if architecture in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False) and fields.has("sliding_window"):
        first = fields.integer("max_window_layers", 28, minimum=0)
        return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return ["full_attention"] * layers


def _windows(fields: Fields, architecture: str, types: list[str]) -> tuple[int | None, ...]:
    sliding = "sliding_attention" in types
    on = architecture != "llama" and fields.has("sliding_window")
    if architecture in ("qwen2", "qwen3"):
        on = on and fields.flag("use_sliding_window", False)
    if sliding and not on:
        raise UnsupportedModel(
            f"config.json: layer_types has sliding layers, but no sliding window is in force for {architecture}"
        )
    position = fields.integer("max_position_embeddings")
    if architecture == "llama" and fields.integer("sliding_window", position) < position:
        raise UnsupportedModel(
            f"config.json: sliding_window={fields.get('sliding_window')} with model_type llama: "
            "Llama has none; remove it, or set model_type to mistral if the model was trained with it"
        )
    if architecture == "mistral" and on and "full_attention" in types:
        raise UnsupportedModel("config.json: a Mistral with both sliding and full layers is not supported")
    window = fields.integer("sliding_window") if sliding else None
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _ropes(fields: Fields, architecture: str, head_dim: int, types: list[str]) -> list[RopeConfig]:
    """One per layer, from the old form (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    position = fields.integer("max_position_embeddings")
    trained = "original_max_position_embeddings"
    original = fields.integer(trained) if fields.has(trained) else None
    scaling = _object(fields, "rope_scaling")
    parameters = _object(fields, "rope_parameters")
    nested = any(isinstance(v, Mapping) for v in (parameters or {}).values())

    def read(options: Mapping[str, Any] | None, theta: float) -> RopeConfig:
        return rope_from_hf(options, theta=theta, dim=head_dim, max_position=position, original=original)

    if architecture == "gemma3":
        if parameters and not nested:
            raise UnsupportedModel(
                "config.json: Gemma 3 needs rope_parameters for full_attention and for sliding_attention"
            )
        full = dict((parameters or {}).get("full_attention") or {}) | dict(scaling or {})
        local = (parameters or {}).get("sliding_attention")
        by_type = {
            "full_attention": read(full, fields.number("rope_theta", 1e6)),
            "sliding_attention": read(local, fields.number("rope_local_base_freq", 1e4)),
        }
        return [by_type[kind] for kind in types]
    theta = fields.number("rope_theta", 1e4)
    if nested:
        assert parameters is not None
        missing = sorted(set(types) - {k for k, v in parameters.items() if isinstance(v, Mapping)})
        if missing:
            raise LoadError(f"config.json: rope_parameters lacks {', '.join(missing)}")
        return [read(parameters[kind], theta) for kind in types]
    if scaling and parameters and read(scaling, theta) != read(parameters, theta):
        raise LoadError("config.json: rope_scaling and rope_parameters contradict each other; keep one of them")
    return [read(parameters or scaling, theta)] * len(types)


def _object(fields: Fields, key: str) -> Mapping[str, Any] | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise LoadError(f"config.json: {key} must be an object or null, not {value!r}")
    return value


def _max_position(fields: Fields, ropes: tuple[RopeConfig, ...]) -> int:
    """max_position_embeddings; with yarn the stretched context where the file still names the training's."""
    longest = fields.integer("max_position_embeddings")
    for rope in ropes:
        if rope.type == "yarn" and rope.original_max_position == longest and _names_original(fields):
            longest = max(longest, int(rope.original_max_position * rope.factor))
    return longest


def _names_original(fields: Fields) -> bool:
    key = "original_max_position_embeddings"
    objects = [fields.values, fields.get("rope_scaling") or {}, fields.get("rope_parameters") or {}]
    objects += [v for v in (fields.get("rope_parameters") or {}).values() if isinstance(v, Mapping)]
    return any(o.get(key) is not None for o in objects)


def _end_ids(*parts: Mapping[str, Any] | None) -> tuple[int, ...]:
    names = ("config.json", "config.json", "generation_config.json")
    ids: dict[int, None] = {}
    for part, name in zip(parts, names, strict=True):
        if part is not None:
            ids.update(dict.fromkeys(Fields(part, name).ids("eos_token_id")))
    return tuple(ids)


def _first_id(*parts: Mapping[str, Any]) -> int | None:
    for part in parts:
        ids = Fields(part, "config.json").ids("bos_token_id")
        if ids:
            return ids[0]
    return None


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            name = part.get(key)
            if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
                return name.removeprefix("torch.")
    return None
