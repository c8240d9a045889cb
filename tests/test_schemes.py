"""Each scheme by itself: the public helpers against reference numbers, and each door against its formula, written here in float64."""
import math

import pytest
import torch
from torch.nn import functional as F

from conftest import SCHEMES, all_logits, random_tokens, reference_values, small_model
from model import (GPT, GPTConfig, RoPE, alibi_slopes, rope_frequencies, rotate, rotation, sinusoidal_table, t5_bucket,
                   wave_frequencies)

REFERENCE = reference_values()
HF, CLOSED_FORM = REFERENCE['hf'], REFERENCE['closed_form']


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_near(found, expected, **tolerance):
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), **tolerance)


def positions_and_mask(read, new, causal=True):
    """What a scheme is told when `new` tokens follow `read` tokens: queries (new,), keys (read + new,), and the mask between them."""
    keys = torch.arange(read + new)
    queries = keys[read:]
    mask = torch.zeros(new, read + new)
    return queries, keys, mask.masked_fill(keys[None] > queries[:, None], -math.inf) if causal else mask


# ----------------------------------------------------------------------------------------------------------------------
# door 1

def test_sinusoidal_table_has_the_reference_values():
    for position, expected in CLOSED_FORM['sinusoidal_interleaved_d8'].items():
        assert_near(sinusoidal_table(float64([int(position)]), 8)[0], expected, rtol=0, atol=1e-12)


def test_sinusoidal_table_is_the_papers_formula_entry_by_entry():
    d, base = 12, 500.0
    table = sinusoidal_table(torch.arange(300), d, base)
    assert table.dtype == torch.float32 and table.shape == (300, d)
    for position in (0, 1, 7, 299):
        for i in range(d // 2):
            angle = position / base ** (2 * i / d)
            assert abs(table[position, 2 * i] - math.sin(angle)) < 5e-5
            assert abs(table[position, 2 * i + 1] - math.cos(angle)) < 5e-5


def test_sinusoidal_table_refuses_an_odd_width():
    with pytest.raises(ValueError, match='even'):
        sinusoidal_table(torch.arange(3), 7)


def test_sinusoids_stand_to_token_embeddings_as_in_the_paper():
    """The paper: sinusoids of RMS 0.707 beside embeddings of RMS 1. Unscaled, beside GPT-2's embeddings, it would be 35 to 1."""
    model = GPT(GPTConfig(position='sinusoidal', vocab_size=64, n_layer=1, n_head=2, n_embd=256, block_size=128))
    added = model.transformer.wpe.embedding(torch.arange(128))
    ratio = added.pow(2).mean().sqrt() / model.transformer.wte.weight.pow(2).mean().sqrt()
    assert abs(ratio - math.sqrt(0.5)) < 0.02


def test_sinusoidal_is_learned_with_a_fixed_table():
    """The same weights, the table written into a learned one: the same logits. So it is added once, scaled, at the right positions."""
    sinusoidal, learned = small_model('sinusoidal', std=0.2), small_model('learned', std=0.2)
    learned.load_state_dict({**sinusoidal.state_dict(), 'transformer.wpe.weight': 0.02 * sinusoidal_table(torch.arange(32), 24)})
    idx = random_tokens(2, 32)
    torch.testing.assert_close(all_logits(sinusoidal, idx), all_logits(learned, idx))


@pytest.mark.parametrize('name', SCHEMES)
def test_only_absolute_schemes_touch_the_embeddings(name):
    """
    A text of one repeated token: attention averages equal values, so whatever the scores are, all positions come out the same, unless
    positions are in the embeddings or (Shaw's a^V) in the values. A `wpe` left in beside RoPE or ALiBi shows here.
    """
    model = small_model(name, std=0.5)
    logits = all_logits(model, torch.full((1, 20), 3))
    same = torch.allclose(logits, logits[:, :1].expand_as(logits), atol=1e-4)
    assert same == (name not in ('learned', 'sinusoidal', 'shaw_values'))


# ----------------------------------------------------------------------------------------------------------------------
# door 2

@pytest.mark.parametrize('entry, size, base', [('default_dim64_base10000', 64, 1e4), ('default_dim128_base500000', 128, 5e5),
                                               ('default_dim128_base10000', 128, 1e4), ('default_dim64_base500000', 64, 5e5)])
def test_rope_frequencies_have_the_reference_values(entry, size, base):
    assert_near(wave_frequencies(size, base), CLOSED_FORM[entry], rtol=1e-12, atol=0)
    frequencies, attention_factor = rope_frequencies(size, base)
    assert frequencies.dtype == torch.float32 and attention_factor == 1
    assert_near(frequencies, CLOSED_FORM[entry], rtol=1e-7, atol=0)         # float64 until the last rounding


@pytest.mark.parametrize('layout', ['half', 'interleaved'])
def test_rotation_has_the_reference_values_in_both_layouts(layout):
    cos, sin = rotation(torch.tensor([3]), rope_frequencies(8)[0], layout=layout)
    turned = rotate(torch.arange(1.0, 9.0), cos[0], sin[0], layout)
    assert_near(turned, CLOSED_FORM['rope_d8_p3_x1to8'][layout], rtol=1e-6, atol=1e-6)
    if layout == 'half':
        assert_near(turned, HF['llama_rope_d8_p3_x1to8'], rtol=1e-6, atol=1e-6)


def test_the_two_layouts_are_one_permutation_apart():
    x, positions, frequencies = torch.randn(11, 8), torch.arange(11), rope_frequencies(8)[0]
    permutation = [0, 2, 4, 6, 1, 3, 5, 7]
    half = rotate(x[:, permutation], *rotation(positions, frequencies, layout='half'), 'half')
    interleaved = rotate(x, *rotation(positions, frequencies, layout='interleaved'), 'interleaved')
    torch.testing.assert_close(half, interleaved[:, permutation], rtol=0, atol=0)


@pytest.mark.parametrize('layout', ['half', 'interleaved'])
def test_rotation_depends_on_the_time_index_only(layout):
    """One vector in all places of (B, T, nh, hs), every size different: what comes out differs along T and along nothing else."""
    position = small_model('rope', rope_layout=layout).transformer.wpe
    vector = torch.randn(8)
    queries, keys, mask = positions_and_mask(read=6, new=5)
    x = vector.expand(4, 5, 3, 8)
    turned, turned_keys = position.turn(x, x, position.angles(queries, keys), layer=0)
    assert turned.shape == (4, 5, 3, 8) and torch.equal(turned, turned_keys)
    for t in range(5):
        expected = rotate(vector, *[table[0] for table in rotation(torch.tensor([6 + t]), rope_frequencies(8)[0], layout=layout)], layout)
        torch.testing.assert_close(turned[:, t], expected.expand(4, 3, 8))
        assert t == 0 or not torch.allclose(turned[:, t], turned[:, t - 1], atol=0.05)


def test_rotate_is_the_formula_pair_by_pair():
    """rotate(), by rolled halves and signed sines, against a cos - b sin, b cos + a sin, to the last bit."""
    x, positions, frequencies = torch.randn(2, 11, 3, 8), torch.arange(11), rope_frequencies(8)[0]
    cos, sin = (table[:, None] for table in rotation(positions, frequencies))
    angles = (positions[:, None] * frequencies)[:, None]
    assert torch.equal(rotate(x, cos, sin), RoPE.reference(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize('layout', ['half', 'interleaved'])
def test_rotation_keeps_norms(layout):
    x = torch.randn(50, 16)
    turned = rotate(x, *rotation(torch.arange(1000, 1050), rope_frequencies(16)[0], layout=layout), layout)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize('layout', ['half', 'interleaved'])
def test_rope_scores_do_not_change_when_both_positions_shift(layout):
    """q(p + 5) . k(r + 5) = q(p) . k(r)"""
    q, k, frequencies = torch.randn(9, 16), torch.randn(9, 16), rope_frequencies(16)[0]

    def scores(shift):
        cos, sin = rotation(torch.arange(9) + shift, frequencies, layout=layout)
        return rotate(q, cos, sin, layout) @ rotate(k, cos, sin, layout).T
    torch.testing.assert_close(scores(5), scores(0), rtol=0, atol=1e-4)
    assert not torch.allclose(scores(0), q @ k.T, atol=0.1)


def test_rope_refuses_an_odd_head_size():
    with pytest.raises(ValueError, match='even'):
        rope_frequencies(7)
    with pytest.raises(ValueError, match='even'):
        GPTConfig(position='rope', n_embd=21, n_head=3)


# ----------------------------------------------------------------------------------------------------------------------
# door 3. Each bias is compared with its formula, for queries that begin a text and for queries that a cache precedes.

BOTH_KINDS_OF_QUERIES = pytest.mark.parametrize('read, new', [(0, 12), (30, 3), (30, 1)])


@pytest.mark.parametrize('n_head', HF['bloom_alibi_slopes'])
def test_alibi_slopes_have_the_reference_values(n_head):
    slopes = alibi_slopes(int(n_head))
    assert slopes.dtype == torch.float32
    assert_near(slopes, HF['bloom_alibi_slopes'][n_head], rtol=1e-6, atol=0)


def test_alibi_slopes_of_six_and_of_eight_heads():
    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert alibi_slopes(8).tolist() == [2 ** -n for n in range(1, 9)]


@pytest.mark.parametrize('causal', [True, False])
@BOTH_KINDS_OF_QUERIES
def test_alibi_bias_is_minus_slope_times_distance(read, new, causal):
    position = small_model('alibi', causal=causal).transformer.wpe
    queries, keys, mask = positions_and_mask(read, new, causal)
    bias = position.consecutive_bias(queries, keys) + mask
    for head, slope in enumerate([0.0625, 0.00390625, 0.25]):
        for i in range(new):
            for j in range(read + new):
                expected = -math.inf if causal and j > read + i else -slope * abs(read + i - j)
                assert bias[0, head, i, j] == expected


def test_t5_buckets_have_the_reference_values():
    assert t5_bucket(torch.arange(1024)).tolist() == HF['t5_causal_bucket_32_128']
    assert t5_bucket(torch.arange(1024), causal=False).tolist() == HF['t5_bidirectional_bucket_past_32_128']


def test_t5_buckets_begin_where_the_paper_has_them():
    buckets = t5_bucket(torch.arange(1024)).tolist()
    assert [buckets.index(bucket) for bucket in range(16)] == list(range(16))
    assert [buckets.index(bucket) for bucket in range(16, 32)] == [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_t5_buckets_are_the_formula_for_other_numbers():
    for num_buckets, max_distance in ((8, 20), (32, 1024), (64, 500)):
        exact = num_buckets // 2
        for distance, bucket in enumerate(t5_bucket(torch.arange(2000), num_buckets, max_distance).tolist()):
            expected = distance
            if distance >= exact:
                share = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
                expected = min(num_buckets - 1, exact + math.floor(share + 1e-9))
            assert bucket == expected, (num_buckets, max_distance, distance)


def test_t5_causal_buckets_put_keys_ahead_in_bucket_0_and_waste_none():
    assert t5_bucket(torch.arange(-50, 0)).tolist() == [0] * 50
    assert set(t5_bucket(torch.arange(200)).tolist()) == set(range(32))


def test_t5_bidirectional_buckets_tell_before_from_after():
    distance = torch.arange(1, 300)
    behind, ahead = t5_bucket(distance, causal=False), t5_bucket(-distance, causal=False)
    assert (ahead == behind + 16).all() and behind.max() == 15
    assert t5_bucket(torch.tensor([[0, 5], [-5, 500]]), causal=False).tolist() == [[0, 5], [21, 15]]


@pytest.mark.parametrize('causal', [True, False])
@BOTH_KINDS_OF_QUERIES
def test_t5_bias_is_the_table_at_the_distances_bucket(read, new, causal):
    position = small_model('t5', std=0.5, causal=causal).transformer.wpe
    queries, keys, mask = positions_and_mask(read, new, causal)
    bias = position.consecutive_bias(queries, keys) + mask
    for i in range(new):
        for j in range(read + new):
            row = t5_bucket(torch.tensor(read + i - j), 8, 20, causal)
            expected = torch.full((3,), -math.inf) if causal and j > read + i else position.table[row]
            assert torch.equal(bias[0, :, i, j], expected)


def test_shaw_index_has_the_reference_values():
    position = small_model('shaw', shaw_max_distance=2, causal=False).transformer.wpe
    distance = torch.arange(5)[:, None] - torch.arange(5)
    row = position.row(distance)
    assert row.tolist() == CLOSED_FORM['shaw_index_T5_k2']
    position = small_model('shaw', shaw_max_distance=2).transformer.wpe
    row = position.row(distance)
    visible = torch.ones(5, 5).tril().bool()
    assert torch.equal(row[visible], torch.tensor(CLOSED_FORM['shaw_index_T5_k2'])[visible])


def test_shaw_tables_have_a_row_for_each_distance_that_occurs():
    assert small_model('shaw_values').transformer.wpe.a_k.shape == (2, 6, 8)
    assert small_model('shaw_values', causal=False).transformer.wpe.a_k.shape == (2, 11, 8)
    assert small_model('shaw_values', causal=False).transformer.wpe.a_v.shape == (2, 11, 8)


@pytest.mark.parametrize('causal', [True, False])
@BOTH_KINDS_OF_QUERIES
def test_shaw_adds_a_vector_per_distance_to_keys_and_values(read, new, causal):
    """Equations 3 and 4 of the paper, with every a_ij written out, in float64. The second layer's tables."""
    position = small_model('shaw_values', std=0.5, causal=causal).transformer.wpe
    q, k, v = torch.randn(2, 3, new, 8), torch.randn(2, 3, read + new, 8), torch.randn(2, 3, read + new, 8)
    queries, keys, mask = positions_and_mask(read, new, causal)
    distance = (keys[None] - queries[:, None]).clamp(-5, 5)                             # j - i
    if causal:
        distance = distance.clamp(max=0)                                                # what lies ahead is masked
    a_k, a_v = position.a_k[1].double()[distance + 5], position.a_v[1].double()[distance + 5]       # (Tq, Tk, hs)
    keys_seen = k.double()[:, :, None] + a_k                                            # (B, nh, Tq, Tk, hs)
    scores = (q.double()[:, :, :, None] * keys_seen).sum(-1) / math.sqrt(8) + mask
    weights = scores.softmax(-1)
    expected = (weights[..., None] * (v.double()[:, :, None] + a_v)).sum(3)

    pairs = queries[:, None] - keys
    added = position.scores(q, k, pairs, layer=1)
    assert_near(added, position.reference(q, pairs, layer=1), rtol=1e-5, atol=1e-5)
    assert_near(q @ k.transpose(-2, -1) / math.sqrt(8) + added + mask, scores, rtol=1e-5, atol=1e-5)
    found = weights.float() @ v + position.values(weights.float(), pairs, layer=1)
    assert_near(found, expected, rtol=1e-5, atol=1e-5)


def test_zeroing_shaws_value_table_changes_the_output():
    model, idx = small_model('shaw_values', std=0.2), random_tokens(1, 12)
    before = all_logits(model, idx)
    torch.nn.init.zeros_(model.transformer.wpe.a_v)
    without_table = all_logits(model, idx)
    assert (before - without_table).abs().max() > 0.1
    keys_only = small_model('shaw', std=0.2)
    keys_only.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if 'a_v' not in name})
    torch.testing.assert_close(all_logits(keys_only, idx), without_table)


def test_shaws_far_row_gets_its_whole_weight_in_bfloat16():
    """At 1,000 tokens nearly all weight falls on the row of the clipped distances, in parts that a bfloat16 sum would drop."""
    position = small_model('shaw_values', std=0.5).to(torch.bfloat16).transformer.wpe
    pairs = 999 - torch.arange(1000)[None]
    uniform = torch.full((1, 3, 1, 1000), 1 / 1000, dtype=torch.bfloat16)
    found = position.values(uniform, pairs, layer=0)[0, 0, 0]
    expected = uniform[0, 0, 0].double() @ position.a_v[0].double()[(torch.arange(1000) - 999).clamp(min=-5) + 5]
    assert found.dtype == torch.bfloat16
    assert_near(found, expected, rtol=0.01, atol=0.002)


@pytest.mark.parametrize('causal', [True, False])
@BOTH_KINDS_OF_QUERIES
def test_tupe_bias_is_the_product_of_projected_positions(read, new, causal):
    """Equation 7's second half, p Uq . p Uk / sqrt(2 d) per head, p the layer-normed sinusoids, in float64."""
    position = small_model('tupe', std=0.2, causal=causal).transformer.wpe
    queries, keys, mask = positions_and_mask(read, new, causal)
    p = F.layer_norm(sinusoidal_table(keys.double(), 24), (24,))
    q, k = ((p @ weight.double().T).view(-1, 3, 8) for weight in (position.u_q, position.u_k))
    expected = torch.einsum('ihd,jhd->hij', q[read:], k) / math.sqrt(2 * 8) + mask
    bias = position.bias(queries, keys) + mask
    assert_near(bias[0], expected, rtol=1e-4, atol=1e-4)


def test_tupe_without_its_projections_is_content_over_sqrt_2d():
    """Uq = Uk = 0 must leave the model without positions whose queries are smaller by sqrt(2)."""
    tupe, none, idx = small_model('tupe', std=0.2), small_model('none', std=0.2), random_tokens(2, 12)
    for weight in tupe.transformer.wpe.parameters():
        torch.nn.init.zeros_(weight)
    none.load_state_dict({name: tensor for name, tensor in tupe.state_dict().items() if 'wpe' not in name})
    assert not torch.allclose(all_logits(tupe, idx), all_logits(none, idx), atol=1e-3)
    for block in none.transformer.h:
        with torch.no_grad():
            block.attn.c_attn.weight[:24] /= math.sqrt(2)
            block.attn.c_attn.bias[:24] /= math.sqrt(2)
    torch.testing.assert_close(all_logits(tupe, idx), all_logits(none, idx), rtol=0, atol=1e-5)


@pytest.mark.parametrize('name', ['alibi', 't5', 'shaw', 'tupe'])
def test_relative_biases_do_not_change_when_both_positions_shift(name):
    """The three that are told distances do not see a shift by 5; TUPE, whose positions are absolute, does."""
    position, q = small_model(name, std=0.5).transformer.wpe, torch.randn(1, 3, 9, 8)
    queries, keys, _ = positions_and_mask(0, 9)
    bias, shifted = (position.scores(q, q, (queries + shift)[:, None] - (keys + shift), layer=0) if position.by_content
                     else position.bias(queries + shift, keys + shift) for shift in (0, 5))
    assert torch.equal(bias, shifted) == (name != 'tupe')


def test_none_opens_no_door():
    position = small_model('none').transformer.wpe
    queries, keys, mask = positions_and_mask(3, 4)
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8)
    turned = position.turn(q, k, position.angles(queries, keys), layer=0)
    assert position.embedding(queries) is None and turned[0] is q and turned[1] is k
    assert position.bias(queries, keys) is None and not position.by_content and not position.needs_weights
    assert list(position.parameters()) == []
