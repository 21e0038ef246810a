"""Tiny random models of every MoE architecture in transformers, and of a few dense ones.

``SIZES`` gives config attributes of the same meaning the same tiny value in every architecture: 2 layers, hidden size
64, 4 experts, vocabulary 128, the K of every text weight a multiple of 16. ``ARCHITECTURES`` adds what is special.
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

#: Config attribute -> value, wherever a config (nested ones too) has that attribute.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "unpadded_vocab_size": 120,
    "vocab_size_per_layer_input": 128,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "depth", "encoder_layers"), 2),
    # Widths of the residual stream and of attention.
    **dict.fromkeys(
        ("hidden_size", "d_model", "text_hidden_size", "thinker_hidden_size", "out_hidden_size", "output_dim"), 64
    ),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "num_sliding_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "rotary_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    "qk_head_dim": 32,
    "o_groups": 2,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 8,
    # MLPs: 48 dense, 32 for an expert where the config tells them apart.
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "dense_intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "prefix_dense_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size", "moe_hidden_size"), 32),
    "hidden_size_per_layer_input": 16,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("moe_topk", "moe_top_k", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 0),
    # Linear attention and state spaces.
    **dict.fromkeys(("linear_num_key_heads", "n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 32),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state", "mamba_dt_rank"), 16),
    # Lengths.
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "max_source_positions"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size"), 16),
    # Towers of multimodal models.
    "image_size": 56,
    "mlp_ratio": 2.0,
    "deepstack_visual_indexes": [0],
    "global_attn_indexes": [0],
    "downsample_channels": [64, 64],
    **dict.fromkeys(("output_channels", "downsample_hidden_size"), 32),
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim", "projector_hidden_size"), 64),
    **dict.fromkeys(("projection_hidden_dim", "projection_intermediate_size", "adapter_in_dim", "adapter_out_dim"), 64),
    "adapter_input_size": 64,
    "merged_hidden_size": 256,
    # Tokens.
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers, and the values of its config that ``SIZES`` does not give."""

    model_class: str
    special: dict[str, Any]


def _arch(model_class: str, **special: Any) -> Architecture:
    return Architecture(model_class, special)


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


_DOTS_SWA = {
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 32),
    **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 16),
}
_QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

#: Name -> how to build it. ``*_vl`` is a whole multimodal model where a text-only class exists too: names differ.
ARCHITECTURES: dict[str, Architecture] = {
    # Dense.
    "llama": _arch("LlamaForCausalLM"),
    "qwen3": _arch("Qwen3ForCausalLM"),
    # Mixture of experts.
    "afmoe": _arch("AfmoeForCausalLM"),
    "aria": _arch("AriaTextForCausalLM"),
    "aria_vl": _arch("AriaForConditionalGeneration"),
    "axk1": _arch("AXK1ForCausalLM"),
    "axk2": _arch("AXK2ForCausalLM"),
    "bailing_hybrid": _arch("BailingHybridForCausalLM"),
    "beam": _arch("BeamForCausalLM"),
    "cohere2_moe": _arch("Cohere2MoeForCausalLM"),
    "dbrx": _arch("DbrxForCausalLM", attn_config={"rope_theta": 1e4, "clip_qkv": 8.0}),
    "deepseek_ocr2": _arch(
        "DeepseekOcr2ForConditionalGeneration", text_config={"mlp_layer_types": ["dense", "sparse"]}
    ),
    "deepseek_v2": _arch("DeepseekV2ForCausalLM"),
    "deepseek_v3": _arch("DeepseekV3ForCausalLM"),
    "deepseek_v32": _arch("DeepseekV32ForCausalLM"),
    "deepseek_v4": _arch("DeepseekV4ForCausalLM"),
    "diffusion_gemma": _arch("DiffusionGemmaForBlockDiffusion"),
    "dots1": _arch("Dots1ForCausalLM", n_shared_experts=1),
    "dots3_note": _arch("Dots3NoteForCausalLM", **_DOTS_SWA),
    "dots3_note_vl": _arch("Dots3NoteForConditionalGeneration", text_config=_DOTS_SWA),
    "ernie4_5_moe": _arch("Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": _arch(
        "Ernie4_5_VLMoeForConditionalGeneration", text_config={"moe_intermediate_size": [32, 16], **_mrope(3, 3, 2)}
    ),
    "exaone_moe": _arch("ExaoneMoeForCausalLM"),
    "flex_olmo": _arch("FlexOlmoForCausalLM"),
    "flint": _arch("FlintForCausalLM", mlp_only_layers=[0]),
    "gemma4": _arch("Gemma4ForCausalLM", enable_moe_block=True),
    "gemma4_vl": _arch("Gemma4ForConditionalGeneration", text_config={"enable_moe_block": True}),
    "glm4_moe": _arch("Glm4MoeForCausalLM"),
    "glm4_moe_lite": _arch("Glm4MoeLiteForCausalLM"),
    "glm4v_moe": _arch("Glm4vMoeForConditionalGeneration", text_config=_mrope(1, 1, 2)),
    "glm5_next": _arch("Glm5NextForConditionalGeneration", text_config={"index_kpool": 4, "qk_rope_head_dim": 0}),
    "glm_moe_dsa": _arch("GlmMoeDsaForCausalLM"),
    "gpt_oss": _arch("GptOssForCausalLM"),
    "granitemoe": _arch("GraniteMoeForCausalLM"),
    "granitemoe_swa": _arch("GraniteMoeSWAForCausalLM"),
    "granitemoehybrid": _arch("GraniteMoeHybridForCausalLM", layer_types=["linear_attention", "full_attention"]),
    "granitemoeshared": _arch("GraniteMoeSharedForCausalLM"),
    "hunyuan_v1_moe": _arch("HunYuanMoEV1ForCausalLM"),
    "hy_v3": _arch("HYV3ForCausalLM"),
    "hy_v4": _arch("HYV4ForCausalLM"),
    "hy_v4_vl": _arch("HYV4VLForConditionalGeneration", text_config=_mrope(2, 3, 3)),
    "inkling": _arch("InklingForCausalLM"),
    "inkling_vl": _arch("InklingForConditionalGeneration", vision_config={"patch_size": 2, "n_layers": 3}),
    "inkling2": _arch("Inkling2ForCausalLM"),
    "inkling2_vl": _arch("Inkling2ForConditionalGeneration"),
    "inkling2_loop": _arch("Inkling2LoopForCausalLM"),
    "inkling2_loop_vl": _arch("Inkling2LoopForConditionalGeneration"),
    "jamba": _arch("JambaForCausalLM", attn_layer_offset=0, attn_layer_period=2),
    "jetmoe": _arch("JetMoeForCausalLM"),
    "kimi_linear": _arch("KimiLinearForCausalLM"),
    "kolibri1": _arch("Kolibri1ForCausalLM"),
    "laguna": _arch("LagunaForCausalLM"),
    "lara_mini": _arch("LaraMiniForCausalLM"),
    "lfm2_moe": _arch("Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"]),
    "llama4": _arch("Llama4ForCausalLM"),
    "llama4_vl": _arch("Llama4ForConditionalGeneration"),
    "longcat_flash": _arch("LongcatFlashForCausalLM"),
    "mellum": _arch("MellumForCausalLM"),
    "mimo_v2_flash": _arch("MiMoV2FlashForCausalLM"),
    "minimax": _arch("MiniMaxForCausalLM"),
    "minimax_m2": _arch("MiniMaxM2ForCausalLM"),
    "minimax_m3": _arch("MiniMaxM3VLForCausalLM"),
    "minimax_m3_vl": _arch("MiniMaxM3SparseForConditionalGeneration"),
    "mistral4": _arch("Mistral4ForCausalLM", head_dim=32),
    "mistral_large4": _arch("MistralLarge4ForConditionalGeneration"),
    "mixtral": _arch("MixtralForCausalLM"),
    "muse_spark": _arch(
        "MuseSparkForConditionalGeneration", audio_config={"num_hidden_layers": 4, "hidden_sizes": [16] * 4}
    ),
    "nemotron_h": _arch("NemotronHForCausalLM", num_hidden_layers=4),
    "olmoe": _arch("OlmoeForCausalLM"),
    "openai_privacy_filter": _arch("OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": _arch("PhimoeForCausalLM"),
    "qwen2_moe": _arch("Qwen2MoeForCausalLM"),
    "qwen3_5_moe": _arch("Qwen3_5MoeForCausalLM"),
    "qwen3_5_moe_vl": _arch("Qwen3_5MoeForConditionalGeneration"),
    "qwen3_moe": _arch("Qwen3MoeForCausalLM"),
    "qwen3_next": _arch("Qwen3NextForCausalLM"),
    "qwen3_omni_moe": _arch("Qwen3OmniMoeThinkerForConditionalGeneration"),
    "qwen3_omni_moe_talker": _arch(
        "Qwen3OmniMoeTalkerForConditionalGeneration",
        text_config={"shared_expert_intermediate_size": 48},
        spatial_merge_size=2,
    ),
    "qwen3_vl_moe": _arch("Qwen3VLMoeForConditionalGeneration"),
    "qwen4_exp": _arch("Qwen4ExpForCausalLM", **_QSA),
    "qwen4_exp_vl": _arch("Qwen4ExpForConditionalGeneration", text_config=_QSA),
    "solar_open": _arch("SolarOpenForCausalLM"),
    "step3p7": _arch("Step3p7ForConditionalGeneration"),
    "unlimited_ocr": _arch("UnlimitedOcrForConditionalGeneration", text_config={"num_key_value_heads": 4}),
    "zaya": _arch("ZayaForCausalLM", num_experts_per_tok=1),
}
#: Experts class that no entry above contains -> why it cannot be built. Every class of transformers 5.24 can.
UNBUILDABLE: dict[str, str] = {}
#: Name in ARCHITECTURES -> why ``model(**tiny_inputs(model))`` fails.
NO_FORWARD: dict[str, str] = {
    "llama4_vl": "transformers 5.24 reads outputs.image_outputs, which an output without images does not have"
}


def tiny_model(
    arch: str, *, dtype: torch.dtype = torch.bfloat16, experts_implementation: str = "eager", seed: int = 0
) -> PreTrainedModel:
    """A model in eval mode with random parameters, none uninitialised; the same arguments give the same bits."""
    model_class = getattr(transformers, ARCHITECTURES[arch].model_class)
    config = _tiny_config(model_class.config_class, ARCHITECTURES[arch].special)
    model = model_class._from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation=experts_implementation
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + center)
    return model.eval()


def tiny_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Keyword arguments for a forward: token ids [2, 12], none of them special."""
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    if type(model).__name__ == "Qwen3OmniMoeTalkerForConditionalGeneration":  # fed by another model, not by tokens
        embeddings = model.get_input_embeddings()(ids).detach()
        return {"inputs_embeds": embeddings, "talker_input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids}


def _tiny_config(config_class: type[PreTrainedConfig], special: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    attributes = default.to_dict()
    values = {name: value for name, value in SIZES.items() if name in attributes}
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := list(dict.fromkeys(attributes.get(name) or ())):
            values[name] = [kinds[0], kinds[-1]]  # one layer of the first kind, one of the last
    if "kv_lora_rank" in attributes or "vision" in default.model_type:  # these attentions have no groups
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name in config_class.sub_configs:
        if (nested := getattr(default, name, None)) is not None:
            values[name] = _tiny_config(type(nested), special.get(name, {}))
    values.update({name: value for name, value in special.items() if name not in config_class.sub_configs})
    return config_class(**values)
