"""Attention: both paths agree, no token sees ahead, order enters where theory says so; half precision and compilation keep it all."""
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from conftest import SCALINGS, SCHEMES, all_logits, random_tokens, small_model
from model import RoPE, Shaw, alibi_slopes, attend, attend_written_out, rope_frequencies, rotation

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EVERY_SCHEME = pytest.mark.parametrize('name', SCHEMES)
EVERY_SCHEME_AND_SCALING = pytest.mark.parametrize('name', [*SCHEMES, *SCALINGS])
CAUSAL_OR_NOT = pytest.mark.parametrize('causal', [True, False])


def logits_and_gradients(model, idx):
    """All logits, and the gradient of the loss by parameter name."""
    logits, loss = model(idx, idx.roll(-1, dims=1))
    names, parameters = zip(*model.named_parameters())
    return logits, dict(zip(names, torch.autograd.grad(loss, parameters)))


def assert_same_logits_and_gradients(found, expected, **tolerance):
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, **tolerance, msg=lambda message: f'{name}: {message}')


@pytest.fixture
def kernel_calls(monkeypatch):
    """Every call of the fused kernel: its mask, and is_causal."""
    calls, kernel = [], F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        calls.append(dict(attn_mask=attn_mask, is_causal=is_causal))
        return kernel(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', watched)
    return calls


# ----------------------------------------------------------------------------------------------------------------------
# two paths

@CAUSAL_OR_NOT
@EVERY_SCHEME
def test_fused_equals_written_out(name, causal):
    """Logits and the gradients of all parameters. (Shaw's values have no fused path: test_schemes.py checks them by formula.)"""
    idx = random_tokens(2, 19)
    fused, written_out = (small_model(name, std=0.2, causal=causal, flash=flash) for flash in (True, False))
    assert_same_logits_and_gradients(logits_and_gradients(fused, idx), logits_and_gradients(written_out, idx), rtol=1e-4, atol=1e-5)


@CAUSAL_OR_NOT
@EVERY_SCHEME
def test_long_inputs_go_in_blocks_and_equal_written_out(name, causal):
    """More queries than a block holds, the last block not full; with a cache, behind keys that are no multiple of it either."""
    idx = random_tokens(2, 300)
    fused, written_out = (small_model(name, std=0.2, causal=causal, flash=flash, block_size=300, n_layer=1)
                          for flash in (True, False))
    assert_same_logits_and_gradients(logits_and_gradients(fused, idx), logits_and_gradients(written_out, idx), rtol=1e-4, atol=1e-5)
    if causal:
        with torch.no_grad():
            expected, cache = all_logits(written_out, idx), fused.make_cache(2)
            found = [fused(chunk, chunk, cache=cache)[0] for chunk in idx.split([70, 200, 30], dim=1)]
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_shaws_bias_is_never_whole_for_long_inputs(monkeypatch):
    """It differs from text to text, so it would be the largest tensor of all: its door is asked for 128 queries at a time."""
    asked, scores = [], Shaw.scores
    monkeypatch.setattr(Shaw, 'scores', lambda self, q, k, distance, layer:
                        asked.append((q.size(2), k.size(2), *distance.shape)) or scores(self, q, k, distance, layer))
    logits_and_gradients(small_model('shaw', block_size=300, n_layer=1), random_tokens(2, 300))
    assert asked == [(128, 128, 128, 128), (128, 256, 128, 256), (44, 300, 44, 300)]


@pytest.mark.parametrize('flash', [True, False])
def test_a_scheme_may_open_two_doors(flash):
    """RoPE that sees the last 40 tokens only: in one layer, a token's logits are those of a text that begins 39 tokens before it."""
    class Window(RoPE):
        def bias(self, queries, keys):
            return torch.zeros(len(queries), len(keys)).masked_fill(queries[:, None] - keys >= 40, -math.inf)[None, None]

    plain, windowed = (small_model('rope', std=0.2, n_layer=1, flash=flash, block_size=300) for _ in range(2))
    windowed.transformer.wpe, idx = Window(windowed.config), random_tokens(2, 300)
    with torch.no_grad():
        logits, cache = all_logits(windowed, idx), windowed.make_cache(2)
        cached = torch.cat([windowed(chunk, chunk, cache=cache)[0] for chunk in idx.split([150, 149, 1], dim=1)], dim=1)
        for t in (39, 40, 127, 128, 299):
            torch.testing.assert_close(logits[:, t], all_logits(plain, idx[:, t - 39:t + 1])[:, -1], rtol=1e-4, atol=1e-5)
        assert (logits[:, 299] - all_logits(plain, idx)[:, 299]).abs().max() > 0.1
    torch.testing.assert_close(cached, logits, rtol=1e-4, atol=1e-5)


def test_written_out_attention_is_the_textbooks():
    """softmax(q k^T * scale + mask) v, query by query, in float64."""
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    bias = torch.randn(1, 3, 4, 7)
    found = attend_written_out(q, k, v, scale=0.3, mask=bias)
    for query in range(4):
        scores = torch.einsum('bhd,bhjd->bhj', q[:, :, query].double(), k.double()) * 0.3 + bias[:, :, query].double()
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        expected = torch.einsum('bhj,bhjd->bhd', weights, v.double())
        torch.testing.assert_close(found[:, :, query].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('path', [attend, attend_written_out])
def test_biases_are_added_after_the_scale(path):
    """ALiBi's rule: the bias is not divided by sqrt(d) itself."""
    q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)
    bias = torch.randn(1, 1, 2, 3)
    expected = (q @ k.transpose(-2, -1) * 0.1 + bias).softmax(-1) @ v
    torch.testing.assert_close(path(q, k, v, 0.1, bias), expected)


@pytest.mark.parametrize('read', [0, 1, 3, 4])
@torch.no_grad()
def test_fewer_queries_than_keys_stand_at_the_end(read, kernel_calls):
    """is_causal alone would align 2 queries with the first 2 of 5 keys; they must see tril(diagonal=3)."""
    model, idx = small_model('none', n_layer=1), random_tokens(1, 5)
    cache = model.make_cache(1)
    if read:
        model(idx[:, :read], cache=cache)
    model(idx[:, read:], cache=cache)
    options = kernel_calls[-1]
    visible = torch.ones(5 - read, 5).tril(diagonal=read).bool()
    if options['attn_mask'] is None:
        assert options['is_causal'] == (read == 0) and (read == 0 or read == 4)
    else:
        assert torch.equal(options['attn_mask'] == 0, visible) and torch.equal(options['attn_mask'] == -math.inf, ~visible)


@pytest.mark.parametrize('name', ['none', 'rope', 'alibi', 'shaw', 'learned'])
@torch.no_grad()
def test_attention_weights_are_those_that_make_the_output(name):
    """model.attention(): rows that sum to 1, nothing ahead; with them, the last layer's output is what the model computes."""
    model, idx = small_model(name, std=0.2, n_layer=1, block_size=150), random_tokens(2, 150)
    weights = model.attention(idx)
    assert weights.shape == (1, 2, 3, 150, 150) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3, 150))
    assert (weights.triu(1) == 0).all()
    block, scheme, seen = model.transformer.h[0], model.transformer.wpe, []
    block.attn.c_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    all_logits(model, idx)
    embedding = scheme.embedding(torch.arange(150))
    x = model.transformer.wte(idx) + (0 if embedding is None else embedding)
    v = block.attn.c_attn(block.ln_1(x))[..., 48:].view(2, 150, 3, 8)
    torch.testing.assert_close(torch.einsum('bhij,bjhd->bihd', weights[0], v).flatten(2), seen[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='peak memory is read from /proc')
def test_a_long_pass_without_a_bias_makes_no_mask():
    """16,384 tokens at once with RoPE: a mask alone would be 1 GB. Measured in a process of its own, over what it held before."""
    script = '''
import torch
from model import GPT, GPTConfig

def peak():
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) for line in file if line.startswith('VmHWM')) / 1024

model = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=1, n_head=1, n_embd=16, position='rope')).eval()
with torch.no_grad():
    model(torch.zeros(1, 128, dtype=torch.int64))
    before = peak()
    model(torch.zeros(1, 16384, dtype=torch.int64))
print(peak() - before)
'''
    done = subprocess.run([sys.executable, '-c', script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200                                         # MB


@pytest.mark.parametrize('name', ['alibi', 't5'])
@pytest.mark.parametrize('read, new', [(0, 150), (37, 5), (60, 1)])
def test_the_fast_bias_is_the_plain_one(name, read, new):
    scheme, keys = small_model(name, std=0.5).transformer.wpe, torch.arange(read + new)
    assert torch.equal(scheme.consecutive_bias(keys[read:], keys), scheme.bias(keys[read:], keys))


@EVERY_SCHEME_AND_SCALING
@torch.no_grad()
def test_positions_0_1_2_given_change_nothing(name):
    model, idx = small_model(name, std=0.2), random_tokens(2, 20)
    torch.testing.assert_close(model(idx, idx, positions=torch.arange(20))[0], all_logits(model, idx), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', ['rope', 'alibi', 't5', 'shaw', 'sinusoidal', 'tupe', 'learned'])
@torch.no_grad()
def test_positions_with_gaps_are_seen(name):
    """Tokens at 0, 2, 4, .. see other distances than at 0, 1, 2, ..; relative schemes see no shift of all by 3."""
    model, idx = small_model(name, std=0.2, block_size=50), random_tokens(2, 20)
    with_gaps = model(idx, idx, positions=torch.arange(0, 40, 2))[0]
    assert (with_gaps - all_logits(model, idx)).abs().max() > 1e-2
    shifted = model(idx, idx, positions=torch.arange(3, 43, 2))[0]
    assert torch.allclose(shifted, with_gaps, atol=1e-4) == (name in ('rope', 'alibi', 't5', 'shaw'))


@EVERY_SCHEME_AND_SCALING
def test_no_mask_beside_is_causal_and_no_row_fully_masked(name, kernel_calls):
    """Kernels differ in what they make of either. In one pass, by chunks, and token by token."""
    model, idx = small_model(name), random_tokens(1, 20)
    with torch.no_grad():
        cache = model.make_cache(1) if name != 'dynamic' else None
        for chunk in (idx, idx[:, :7], idx[:, :1]):
            all_logits(model, chunk)
        for chunk in idx.split([9, 4, 1, 6], dim=1):
            model(chunk, cache=cache)
    assert len(kernel_calls) == (0 if name == 'shaw_values' else 7 * 2)
    for options in kernel_calls:
        mask = options.get('attn_mask')
        assert mask is None or not options.get('is_causal')
        assert mask is None or (mask.amax(dim=-1) > -math.inf).all()


@pytest.mark.parametrize('name', ['none', 'learned', 'sinusoidal', 'rope', 'yarn'])
def test_schemes_without_a_bias_keep_the_fused_causal_kernel(name, kernel_calls):
    all_logits(small_model(name), random_tokens(1, 20))
    assert all(options['is_causal'] and options['attn_mask'] is None for options in kernel_calls) and len(kernel_calls) == 2


# ----------------------------------------------------------------------------------------------------------------------
# who sees whom

@pytest.mark.parametrize('flash', [True, False])
@EVERY_SCHEME_AND_SCALING
def test_a_future_token_changes_no_earlier_logit(name, flash):
    model, idx = small_model(name, std=0.2, flash=flash), random_tokens(2, 24)
    changed = idx.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 17
    difference = (all_logits(model, changed) - all_logits(model, idx)).abs().amax(dim=-1)
    assert difference[:, :11].max() < 1e-5
    assert difference[:, 11:].min() > 1e-3                                  # and every later one, its own included


@EVERY_SCHEME
def test_without_the_causal_mask_every_token_sees_every_other(name):
    model, idx = small_model(name, std=0.2, causal=False), random_tokens(2, 24)
    changed = idx.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 17
    difference = (all_logits(model, changed) - all_logits(model, idx)).abs().amax(dim=-1)
    assert difference.min() > 1e-3


def test_without_mask_and_positions_attention_is_permutation_equivariant():
    """Permute the tokens and the outputs permute alike (not: stay the same)."""
    model, idx, order = small_model('none', std=0.2, causal=False), random_tokens(2, 20), torch.randperm(20)
    logits = all_logits(model, idx)
    torch.testing.assert_close(all_logits(model, idx[:, order]), logits[:, order], rtol=0, atol=1e-5)
    assert not torch.allclose(logits[:, order], logits, atol=1e-2)


@pytest.mark.parametrize('name', [name for name in SCHEMES if name != 'none'])
def test_every_scheme_breaks_permutation_equivariance(name):
    model, idx, order = small_model(name, std=0.2, causal=False), random_tokens(2, 20), torch.randperm(20)
    assert not torch.allclose(all_logits(model, idx[:, order]), all_logits(model, idx)[:, order], atol=1e-2)


@pytest.mark.parametrize('n_layer, order_matters', [(1, False), (2, True)])
def test_two_causal_layers_learn_order_without_positions_and_one_does_not(n_layer, order_matters):
    """The last token stays, those before it are shuffled: one layer sees a bag of words, a second sees what each could see."""
    model, idx = small_model('none', std=0.3, n_layer=n_layer), random_tokens(2, 20)
    shuffled = torch.cat((idx[:, torch.randperm(19)], idx[:, 19:]), dim=1)
    difference = (model(shuffled)[0] - model(idx)[0]).abs().max()
    assert difference > 1e-2 if order_matters else difference < 1e-5


# ----------------------------------------------------------------------------------------------------------------------
# half precision

def test_a_cast_model_keeps_its_frequencies_and_slopes_in_float32():
    for name in ('rope', 'yarn', 'alibi'):
        plain, cast = small_model(name).transformer.wpe, small_model(name).to(torch.bfloat16).float().to(torch.bfloat16).transformer.wpe
        for attribute in ('frequencies', 'slopes'):
            if hasattr(plain, attribute):
                assert getattr(cast, attribute).dtype == torch.float32
                assert torch.equal(getattr(cast, attribute), getattr(plain, attribute))


@EVERY_SCHEME_AND_SCALING
def test_a_cast_model_prepares_angles_and_biases_in_float32(name):
    """As the float32 model whose own weights are rounded to bfloat16."""
    position = small_model(name, std=0.2).to(torch.bfloat16).transformer.wpe
    rounded = small_model(name, std=0.2).to(torch.bfloat16).float().transformer.wpe
    keys = torch.arange(30)
    found, expected = ((scheme.embedding(keys), scheme.angles(keys, keys), scheme.consecutive_bias(keys, keys))
                       for scheme in (position, rounded))
    torch.testing.assert_close(found[1:], expected[1:], rtol=0, atol=0)
    for tensor in (*(found[1] or ()), *(() if found[2] is None else (found[2],))):
        assert tensor.dtype == torch.float32


@EVERY_SCHEME_AND_SCALING
def test_a_float64_model_is_float64_accurate(name):
    """Both paths agree to 1e-10, positions included: nothing on the way is rounded to float32."""
    idx = random_tokens(2, 40)
    fused, written_out = (small_model(name, std=0.2, flash=flash, block_size=64).double() for flash in (True, False))
    torch.testing.assert_close(all_logits(fused, idx), all_logits(written_out, idx), rtol=1e-10, atol=1e-10)
    if name in ('rope', 'sinusoidal', 'alibi', 'tupe'):
        scheme = fused.transformer.wpe
        for table, exact in ((getattr(scheme, key), value) for key, value in scheme.exact.items()):
            assert table.dtype == torch.float64 and torch.equal(table, exact)


def test_angles_err_by_rounding_the_output_alone():
    """d = 64, n = 2048: a table rounded to bfloat16 at the very end errs under 0.002; rounded frequencies would err by 0.858."""
    model = small_model('rope', n_head=1, n_embd=64).to(torch.bfloat16)
    positions = torch.arange(2048)
    exact = torch.outer(positions.double(), 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)).cos()
    cos = model.transformer.wpe.angles(positions, positions)[0].view(2048, 64)
    assert (cos[:, :32].double() - exact).abs().max() < 2e-4
    assert (cos[:, :32].bfloat16().double() - exact).abs().max() < 0.002
    wrong, _ = rotation(positions, rope_frequencies(64)[0].bfloat16().float())
    assert (wrong[:, :32].double() - exact).abs().max() > 0.8


def test_alibis_bias_is_exact_at_2048_tokens_in_a_cast_model():
    """In bfloat16, m * j errs by 6.77 there and ties 1,495 neighbours with one another."""
    position = small_model('alibi', n_head=16, n_embd=32).to(torch.bfloat16).transformer.wpe
    queries, keys = torch.tensor([2047]), torch.arange(2048)
    bias = position.consecutive_bias(queries, keys)[0, 0, 0]
    assert bias.dtype == torch.float32
    assert (bias.double() + alibi_slopes(16)[0].double() * (2047 - keys)).abs().max() < 1e-4
    assert (bias.diff() > 0).all()                                          # no two neighbours tie


@pytest.mark.parametrize('flash', [True, False])
@EVERY_SCHEME
def test_a_bfloat16_model_runs_and_comes_near_the_float32_one(name, flash):
    idx = random_tokens(2, 20)
    half = small_model(name, std=0.1, flash=flash).to(torch.bfloat16)
    logits, gradients = logits_and_gradients(half, idx)
    expected, _ = logits_and_gradients(half.float(), idx)                   # the same weights, in float32
    assert logits.dtype == torch.bfloat16
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert (logits.float() - expected).abs().max() < 0.05 < expected.std() / 2


@pytest.mark.parametrize('flash', [True, False])
@EVERY_SCHEME
def test_autocast_runs_and_comes_near_float32(name, flash):
    model, idx = small_model(name, std=0.1, flash=flash), random_tokens(2, 20)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        logits, gradients = logits_and_gradients(model, idx)
    expected, expected_gradients = logits_and_gradients(model, idx)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.05 < expected.std() / 2
    for parameter, gradient in expected_gradients.items():
        assert (gradients[parameter] - gradient).norm() < 0.1 * gradient.norm(), parameter


@pytest.mark.parametrize('name', ['alibi', 't5', 'tupe', 'shaw'])
def test_autocast_leaves_biases_in_float32(name, kernel_calls):
    """What reaches the kernel under autocast, where all it is made of is the same as without, is the same number to all digits."""
    model, idx = small_model(name, std=0.2, n_layer=1), random_tokens(1, 30)
    with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):
        all_logits(model, idx)
        attention = model.transformer.h[0].attn
        q = attention.c_attn(model.transformer.h[0].ln_1(model.transformer.wte(idx))).view(1, 30, 3, 3, 8)[:, :, 0].transpose(1, 2)
    keys = torch.arange(30)
    mask = torch.zeros(30, 30).masked_fill(keys[None] > keys[:, None], -math.inf)
    scheme = model.transformer.wpe
    expected = mask + (scheme.scores(q, None, keys[:, None] - keys, 0) if scheme.by_content else scheme.bias(keys, keys))
    assert q.dtype == torch.bfloat16 and kernel_calls[0]['attn_mask'].dtype == torch.float32
    torch.testing.assert_close(kernel_calls[0]['attn_mask'], expected, rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# torch.compile

@EVERY_SCHEME_AND_SCALING
def test_compiled_equals_eager(name):
    """Traced as one graph, forward and backward, without a compiler of machine code (which takes long)."""
    model, idx = small_model(name, std=0.2, n_layer=1), random_tokens(2, 24)
    torch.compiler.reset()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    logits, loss = compiled(idx, idx)
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
    expected, loss = model(idx, idx)
    expected_gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
    assert_same_logits_and_gradients((logits, gradients), (expected, expected_gradients), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')), reason='needs a C++ compiler')
def test_rope_compiled_to_machine_code_equals_eager():
    """One attention layer, the rotation included, as one graph and by the default compiler."""
    model, x, positions = small_model('rope', std=0.2), torch.randn(2, 24, 24), torch.arange(24)

    def attention(x):
        position = model.transformer.wpe
        return model.transformer.h[0].attn(x, position, position.angles(positions, positions), model.blocks(None, positions, positions))
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(attention, fullgraph=True)(x), attention(x), rtol=1e-4, atol=1e-5)
