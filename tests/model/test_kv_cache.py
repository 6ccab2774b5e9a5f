"""Generation with cached keys and values gives the logits of one full forward."""

import pytest
import torch

from megatron.model.decoder import Decoder
from megatron.model.kv_cache import KVCache
from tests.model.small import decoder, model_args, specs, tokens

FAMILIES = {
    "rotary": {"rotary_pct": 0.5, "gpt_j_residual": True},
    "learned": {"pos_emb": "learned", "opt_pos_emb_offset": 2},
    "sinusoidal": {"pos_emb": "sinusoidal"},
    "alibi": {"pos_emb": "alibi"},
    "alibi window": {"pos_emb": "alibi", "sliding_window_width": 4},
    "grouped queries": {"num_kv_heads": 2, "norm": "rmsnorm"},
    "window": {"sliding_window_width": 4, "num_kv_heads": 3},
    "recomputing": {"checkpoint_activations": True},
}


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(5, *[1] * 11), (5, 3, 8), (16,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_the_logits_of_the_whole(family, pieces):
    model = decoder(model_args(**FAMILIES[family], init_method_std=0.2))
    cache = KVCache(max_num_tokens=16)
    logits = [model(piece, cache) for piece in tokens().split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens()), rtol=0, atol=1e-5)
    assert cache.num_tokens == 16


@torch.no_grad()
def test_each_stage_has_its_own_cache():
    layers = specs(model_args())
    first, last = Decoder(layers[:2]), Decoder(layers[2:])
    first_cache, last_cache = KVCache(16), KVCache(16)
    logits = [last(first(piece, first_cache), last_cache) for piece in tokens().split((7, 9), dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), Decoder(layers)(tokens()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recomputing", [False, True])
def test_gradients_through_the_cache_are_refused(recomputing):
    with pytest.raises(ValueError, match="for inference"):
        decoder(model_args(checkpoint_activations=recomputing))(tokens(), KVCache(16))


@torch.no_grad()
def test_full_cache_is_refused():
    with pytest.raises(ValueError, match="holds 12 tokens, not 16"):
        decoder(model_args())(tokens(), KVCache(max_num_tokens=12))


@torch.no_grad()
def test_positions_beyond_the_learned_are_refused():
    with pytest.raises(ValueError, match="33 positions are needed, max_position_embeddings is 32"):
        decoder(model_args(pos_emb="learned"))(tokens(seq_length=33))
