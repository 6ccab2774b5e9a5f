"""The shape of the network and how its weights start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron.neox_arguments.section import DERIVED, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section

InitMethod = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
    "single_residual_scaled_normal",
]
Activation = Literal["gelu", "geglu", "relu", "softsign", "swish", "mish", "silu", "reglu", "swiglu", "bilinear", "glu"]
GATED_ACTIVATIONS = frozenset({"geglu", "reglu", "swiglu", "bilinear", "glu"})


class ModelArgs(Section):
    """A decoder-only transformer."""

    num_layers: PositiveInt
    """Number of transformer blocks."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Number of query heads; must divide `hidden_size`."""
    num_kv_heads: PositiveInt = DERIVED
    """Number of key and value heads (grouped-query attention); must divide `num_attention_heads`. Unset: as many."""
    seq_length: PositiveInt
    """Tokens of a training sample."""
    max_position_embeddings: PositiveInt = DERIVED
    """Longest sequence the position embedding can address. Unset: `seq_length`, which it may not be smaller than."""
    sliding_window_width: PositiveInt | None = None
    """Each token attends to itself and at most this many tokens less one before it. Unset: to all before it."""

    intermediate_size: PositiveInt | None = None
    """Width of the MLP; with a gated activation and `mlp_multiple_of` three times the width before it is rounded up.
    Unset: `expansion_factor` x `hidden_size`, with a gated activation two thirds of it."""
    expansion_factor: Annotated[float, Field(gt=0.0, le=1024.0)] | None = None
    """Width of the MLP as a multiple of `hidden_size`, if `intermediate_size` is unset; at most 1024. Unset: 4."""
    mlp_multiple_of: PositiveInt = 1
    """With a gated activation, the width of the MLP is rounded up to a multiple of this."""
    ffn_hidden_size: PositiveInt = DERIVED
    """Derived: the width of the MLP between its two matrices. May be set to choose it directly."""

    norm: Literal["layernorm", "rmsnorm", "non_parametric_layernorm", "scalenorm"] = "layernorm"
    """Normalisation before attention, before the MLP and at the end."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in `layernorm` and `non_parametric_layernorm`."""
    rms_norm_epsilon: PositiveFloat = 1e-8
    """Added to the mean square in `rmsnorm`."""
    scalenorm_epsilon: PositiveFloat = 1e-8
    """Smallest norm `scalenorm` divides by."""
    use_qk_layernorm: bool = False
    """Normalise queries and keys of each head."""

    pos_emb: Literal["learned", "rotary", "sinusoidal", "alibi", "none"] = "learned"
    """How the model knows positions."""
    rotary_pct: Probability = 1.0
    """Share of each head's dims that `rotary` rotates."""
    rotary_emb_base: PositiveInt = 10000
    """Base of the wavelengths of `rotary`."""
    opt_pos_emb_offset: NonNegativeInt = 0
    """Rows of a `learned` position embedding before position 0, as OPT models have two."""
    no_weight_tying: bool = False
    """Give the head a weight of its own instead of the input embedding's."""
    gpt_j_residual: bool = False
    """Add attention and MLP to the residual stream side by side instead of one after the other."""
    gpt_j_tied: bool = False
    """With `gpt_j_residual`, feed attention and MLP from one norm instead of two."""
    activation: Activation = "gelu"
    """Nonlinearity of the MLP. Those ending in `glu`, and `bilinear`, are gated and use three matrices."""
    use_bias_in_norms: bool = True
    """Give layer norms a bias."""
    use_bias_in_attn_linear: bool = True
    """Give the projections of attention a bias."""
    use_bias_in_mlp: bool = True
    """Give the matrices of the MLP a bias."""

    init_method: InitMethod = "normal"
    """Distribution of starting weights."""
    output_layer_init_method: InitMethod = "scaled_normal"
    """Distribution of starting weights of the matrices that write into the residual stream."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation used by the `normal` methods."""

    attention_dropout: Probability = 0.0
    """Probability of dropping an attention weight while training."""
    hidden_dropout: Probability = 0.0
    """Probability of dropping an element that is about to be added to the residual stream."""
    checkpoint_activations: bool = False
    """Keep only block boundaries in forward and recompute the rest in backward: less memory, a third more compute."""
    checkpoint_num_layers: PositiveInt = 1
    """Number of blocks recomputed together."""

    make_vocab_size_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times `model_parallel_size`."""
    padded_vocab_size: PositiveInt = DERIVED
    """Rows of the embedding. Derived from the tokenizer; may be set, but not to less than the tokenizer needs."""
