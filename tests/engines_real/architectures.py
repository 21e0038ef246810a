"""Which architectures vLLM 0.33.0 builds on a CPU at tiny size, and what it asks for beyond transformers' configs."""

from typing import Any

from tiny_models import ARCHITECTURES

#: Keys of config.json that published checkpoints have and vLLM asks for, where transformers' config class has none.
EXTRA: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": 16},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm4v_moe": {"text_config": {"head_dim": 16, "use_qk_norm": False}},
    "hy_v3": {
        **{"first_k_dense_replace": 1, "expert_hidden_dim": 32, "qk_norm": True},
        **{"router_scaling_factor": 1.0, "route_norm": True},
    },
    "longcat_flash": {
        **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
        **{"router_bias": False, "norm_topk_prob": False},
    },
    "mimo_v2_flash": {
        **{"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "layernorm_epsilon": 1e-5},
        **{"attention_bias": False, "scoring_func": "sigmoid", "swa_num_attention_heads": 4},
        **{"swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 16, "v_head_dim": 16},
        **{"sliding_window_size": 16, "partial_rotary_factor": 1.0, "swa_rope_theta": 1e4},
        **{"add_swa_attention_sink_bias": False, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1},
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
}
_NO_CLASS = "transformers 5.20, the newest that vLLM 0.33 takes, has no such class"
_NEEDS_MORE = "its tiny config lacks what vLLM asks for (processor, towers, config keys)"
#: Architecture -> why vLLM does not build it here.
NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(("dots3_note", "dots3_note_vl", "flint", "hy_v4_vl", "inkling2", "inkling2_vl"), _NO_CLASS),
    **dict.fromkeys(("inkling2_loop", "inkling2_loop_vl", "lara_mini", "mistral_large4"), _NO_CLASS),
    **dict.fromkeys(("deepseek_ocr2", "ernie4_5_vl_moe", "gemma4_vl", "glm5_next", "inkling"), _NEEDS_MORE),
    **dict.fromkeys(("minimax_m3_vl", "qwen3_omni_moe", "qwen3_omni_moe_talker"), _NEEDS_MORE),
    **dict.fromkeys(("qwen4_exp_vl", "step3p7", "unlimited_ocr"), _NEEDS_MORE),
    **dict.fromkeys(("inkling_vl", "muse_spark"), "makes CUDA events"),
    **dict.fromkeys(("bailing_hybrid", "minimax"), "vLLM has no linear attention for it, not even in BF16"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), "vLLM has no sparse attention for a CPU"),
    "dbrx": "vLLM 0.33 does not load it in BF16 either: KeyError 'blocks.0.ffn.experts.w13_weight'",
    "deepseek_v4": "its kernels have fixed head sizes, far from tiny",
    "diffusion_gemma": "needs vLLM's second model runner, which needs Triton on a GPU",
    "kimi_linear": "imports nvidia-cutlass-dsl",
    "qwen4_exp": "its attention needs FlashAttention",
}
BUILT = [arch for arch in ARCHITECTURES if arch not in NOT_BUILT]
