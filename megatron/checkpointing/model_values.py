"""Which values of the model section a checkpoint must agree with."""

from megatron.checkpointing.snapshot import ModelValues

# What changes the function a set of weights computes. Sizes are here too, although shapes would tell: "hidden_size was
# 512 and is 768" says it better. What may change on resume is not: dropout, initialisation, recomputation, lengths.
_NAMES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "sliding_window_width",
    "padded_vocab_size",
    "norm",
    "layernorm_epsilon",
    "rms_norm_epsilon",
    "scalenorm_epsilon",
    "use_qk_layernorm",
    "pos_emb",
    "opt_pos_emb_offset",
    "rotary_pct",
    "rotary_emb_base",
    "activation",
    "no_weight_tying",
    "gpt_j_residual",
    "gpt_j_tied",
    "use_bias_in_norms",
    "use_bias_in_attn_linear",
    "use_bias_in_mlp",
)


PADDED_VOCABULARY = "padded_vocab_size"
VOCABULARY = "vocab_size"


def model_values(model_args: object, *, vocab_size: int | None = None) -> ModelValues:
    """The values of the `model` section to save with weights and to compare on load. AttributeError if one is gone.

    `vocab_size` is the tokenizer's, without padding: where it is the same, the padding may change with the number of
    tensor ranks.
    """
    return {name: getattr(model_args, name) for name in _NAMES} | {VOCABULARY: vocab_size}
