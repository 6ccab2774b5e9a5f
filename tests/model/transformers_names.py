"""transformers' parameters under our names and in our layouts. Every map is linear, so it takes gradients as well."""

import torch


def pack_qkv(q, k, v, num_kv_heads):
    """Interleave separate projections by key/value head: its queries, its key, its value."""
    rest = q.shape[1:]
    head_dim = k.shape[0] // num_kv_heads
    parts = [part.reshape(num_kv_heads, -1, head_dim, *rest) for part in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def block_names(prefix, names):
    """Return {their name: our name} of the weights and biases of one block."""
    return {
        f"{theirs}.{part}": f"{prefix}.{ours}.{part}" for theirs, ours in names.items() for part in ("weight", "bias")
    }


def select(theirs, their_prefix, names):
    """Take those of `names` that this model has."""
    return {ours: theirs[their_prefix + name] for name, ours in names.items() if their_prefix + name in theirs}


def neox(theirs, config):
    ours = {
        "layers.0.word_embeddings.weight": theirs["gpt_neox.embed_in.weight"],
        f"layers.{config.num_hidden_layers + 2}.final_linear.weight": theirs["embed_out.weight"]
        if "embed_out.weight" in theirs
        else theirs["lm_head.weight"],
    }
    ours |= select(theirs, "gpt_neox.final_layer_norm.", _norm(f"layers.{config.num_hidden_layers + 1}.norm"))
    same = ("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense")
    same += ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    for i in range(config.num_hidden_layers):
        ours |= select(theirs, f"gpt_neox.layers.{i}.", block_names(f"layers.{i + 1}", {name: name for name in same}))
    return ours


def _norm(prefix):
    return {"weight": f"{prefix}.weight", "bias": f"{prefix}.bias"}


def llama(theirs, config):
    """Llama, Mistral, Qwen3, OLMo and Phi: separate q, k, v; gated MLP or fc1/fc2."""
    num_layers = config.num_hidden_layers
    ours = {"layers.0.word_embeddings.weight": theirs["model.embed_tokens.weight"]}
    ours[f"layers.{num_layers + 2}.final_linear.weight"] = theirs["lm_head.weight"]
    for name in ("model.norm.", "model.final_layernorm."):
        ours |= select(theirs, name, _norm(f"layers.{num_layers + 1}.norm"))
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
        "self_attn.o_proj": "attention.dense",
        "self_attn.dense": "attention.dense",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "mlp.fc1": "mlp.dense_h_to_4h",
        "mlp.fc2": "mlp.dense_4h_to_h",
    }
    for i in range(num_layers):
        prefix, target = f"model.layers.{i}.", f"layers.{i + 1}"
        ours |= select(theirs, prefix, block_names(target, names))
        for part in ("weight", "bias"):
            qkv = [theirs.get(f"{prefix}self_attn.{name}_proj.{part}") for name in "qkv"]
            if qkv[0] is not None:
                ours[f"{target}.attention.query_key_value.{part}"] = pack_qkv(*qkv, config.num_key_value_heads)
            gate, up = (theirs.get(f"{prefix}mlp.{name}_proj.{part}") for name in ("gate", "up"))
            if gate is not None:
                ours[f"{target}.mlp.dense_h_to_4h.{part}"] = torch.cat((gate, up))
    return ours


def gpt2(theirs, config):
    """Conv1D keeps its weights transposed; the head is the embedding."""
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "attention.dense",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    }
    transposed = {name: value.t() if value.dim() == 2 else value for name, value in theirs.items()}
    ours = {
        "layers.0.word_embeddings.weight": theirs["transformer.wte.weight"],
        "layers.0.position_embeddings.weight": theirs["transformer.wpe.weight"],
    }
    ours |= select(theirs, "transformer.ln_f.", _norm(f"layers.{config.n_layer + 1}.norm"))
    for i in range(config.n_layer):
        prefix, target = f"transformer.h.{i}.", f"layers.{i + 1}"
        ours |= select(transposed, prefix, block_names(target, names))
        for part in ("weight", "bias"):
            q, k, v = transposed[f"{prefix}attn.c_attn.{part}"].chunk(3)
            ours[f"{target}.attention.query_key_value.{part}"] = pack_qkv(q, k, v, config.n_head)
    return ours


def opt(theirs, config):
    names = {
        "self_attn_layer_norm": "input_layernorm",
        "final_layer_norm": "post_attention_layernorm",
        "self_attn.out_proj": "attention.dense",
        "fc1": "mlp.dense_h_to_4h",
        "fc2": "mlp.dense_4h_to_h",
    }
    ours = {
        "layers.0.word_embeddings.weight": theirs["model.decoder.embed_tokens.weight"],
        "layers.0.position_embeddings.weight": theirs["model.decoder.embed_positions.weight"],
    }
    ours |= select(theirs, "model.decoder.final_layer_norm.", _norm(f"layers.{config.num_hidden_layers + 1}.norm"))
    for i in range(config.num_hidden_layers):
        prefix, target = f"model.decoder.layers.{i}.", f"layers.{i + 1}"
        ours |= select(theirs, prefix, block_names(target, names))
        for part in ("weight", "bias"):
            qkv = [theirs[f"{prefix}self_attn.{name}_proj.{part}"] for name in "qkv"]
            ours[f"{target}.attention.query_key_value.{part}"] = pack_qkv(*qkv, config.num_attention_heads)
    return ours


def mpt(theirs, config):
    names = {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attn.out_proj": "attention.dense",
        "ffn.up_proj": "mlp.dense_h_to_4h",
        "ffn.down_proj": "mlp.dense_4h_to_h",
    }
    ours = {"layers.0.word_embeddings.weight": theirs["transformer.wte.weight"]}
    ours |= select(theirs, "transformer.norm_f.", _norm(f"layers.{config.n_layers + 1}.norm"))
    for i in range(config.n_layers):
        prefix, target = f"transformer.blocks.{i}.", f"layers.{i + 1}"
        ours |= select(theirs, prefix, block_names(target, names))
        q, k, v = theirs[f"{prefix}attn.Wqkv.weight"].chunk(3)
        ours[f"{target}.attention.query_key_value.weight"] = pack_qkv(q, k, v, config.n_heads)
    return ours
