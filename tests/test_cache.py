"""The cache gives what a pass over the whole text gives, for every scheme; and generation computes what its docstring says."""
import itertools
import math

import pytest
import torch

from conftest import SCALINGS, SCHEMES, all_logits, random_tokens, small_model
from model import choose

LENGTH = 80                                     # tokens: past block_size, which is 32, but for `learned`, whose table would end
EXACT = [name for name in (*SCHEMES, *SCALINGS) if name != 'dynamic']      # `dynamic` has tests of its own below


def model_for(name, std, **options):
    return small_model(name, std=std, **(dict(block_size=LENGTH) if name == 'learned' else {}), **options)


# ----------------------------------------------------------------------------------------------------------------------
# cached = full

@pytest.mark.parametrize('std', [None, 0.2], ids=['at initialisation', 'of a trained size'])
@pytest.mark.parametrize('name', EXACT)
@torch.no_grad()
def test_cached_equals_full(name, std):
    """One token at a time, and in chunks of 7 and 64: at every position, in a batch, the same logits within 1e-4."""
    model, idx = model_for(name, std), random_tokens(2, LENGTH)
    expected = all_logits(model, idx)
    assert std is None or expected.std() > 0.5
    for size in (1, 7, 64):
        cache = model.make_cache(2)
        found = torch.cat([all_logits(model, chunk, cache=cache) for chunk in idx.split(size, dim=1)], dim=1)
        assert cache.length == LENGTH
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', EXACT)
@torch.no_grad()
def test_cached_equals_full_in_chunks_of_many_sizes_without_targets(name):
    """The last position's logits of each chunk; a prompt, single tokens and a second prompt take turns, on the written-out path too."""
    for flash in (True, False):
        model, idx = model_for(name, 0.2, flash=flash), random_tokens(3, LENGTH)
        expected, cache = all_logits(model, idx), model.make_cache(3)
        for chunk in idx.split([10, 1, 1, 20, 1, 40, 1, 6], dim=1):
            logits, loss = model(chunk, cache=cache)
            assert logits.shape == (3, 1, 17) and loss is None
            torch.testing.assert_close(logits[:, 0], expected[:, cache.length - 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', EXACT)
@torch.no_grad()
def test_a_cleared_cache_has_forgotten_everything(name):
    model, idx = model_for(name, 0.2), random_tokens(2, 30)
    cache = model.make_cache(2)
    model(random_tokens(2, 50, seed=9), cache=cache)
    cache.length = 0
    found = torch.cat([all_logits(model, chunk, cache=cache) for chunk in idx.split(7, dim=1)], dim=1)
    torch.testing.assert_close(found, all_logits(model, idx), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_loss_through_a_cache_is_the_chunks_loss():
    model, idx, targets = small_model('rope', std=0.2), random_tokens(2, 40), random_tokens(2, 40, seed=3)
    _, whole = model(idx, targets)
    cache = model.make_cache(2)
    losses = [model(*pair, cache=cache)[1] for pair in zip(idx.split(10, dim=1), targets.split(10, dim=1))]
    assert torch.stack(losses).mean().item() == pytest.approx(whole.item(), rel=1e-5)


@torch.no_grad()
def test_a_cached_step_computes_one_token_only():
    """The point of a cache: a single token goes through the blocks, however many have been read."""
    model, seen = small_model('rope'), []
    model.transformer.h[1].register_forward_hook(lambda block, inputs, output: seen.append(output.size(1)))
    cache = model.make_cache(1)
    model(random_tokens(1, 50), cache=cache)
    model(random_tokens(1, 1), cache=cache)
    assert seen == [50, 1]


@torch.no_grad()
def test_cached_equals_full_in_bfloat16():
    """Keys are cached after turning, in the model's dtype; only rounding may differ, and not more late than early."""
    model, idx = small_model('rope', std=0.1).to(torch.bfloat16), random_tokens(2, LENGTH)
    cache = model.make_cache(2)
    found = torch.cat([all_logits(model, token, cache=cache) for token in idx.split(1, dim=1)], dim=1)
    error = (found - all_logits(model, idx)).float().abs().amax(dim=(0, 2))
    assert error.max() < 0.05


# ----------------------------------------------------------------------------------------------------------------------
# dynamic: beyond the original length, 16, every token changes all frequencies

@torch.no_grad()
def test_dynamic_really_differs_between_lengths():
    """So keeping the keys of an old base would be wrong, and the test above would see it."""
    model, idx = small_model('dynamic', std=0.2), random_tokens(2, 40)
    assert (all_logits(model, idx)[:, :20] - all_logits(model, idx[:, :20])).abs().max() > 1e-2


def test_dynamic_has_no_cache():
    """Keys of an old base would be wrong ones."""
    with pytest.raises(ValueError, match='nothing can be cached'):
        small_model('dynamic').make_cache(1)


@torch.no_grad()
def test_dynamic_generates_what_full_passes_say():
    model, idx = small_model('dynamic', std=0.2), random_tokens(1, 12)
    text = model.generate(idx, 20, temperature=0, context=64)
    for t in range(12, 32):
        assert text[0, t] == model(text[:, :t])[0][0, -1].argmax()


# ----------------------------------------------------------------------------------------------------------------------
# ends

@torch.no_grad()
def test_learned_past_its_table_says_how_long_it_is():
    model = small_model('learned')
    with pytest.raises(ValueError, match='32'):
        model(random_tokens(1, 33))
    cache = model.make_cache(1)
    model(random_tokens(1, 32), cache=cache)
    with pytest.raises(ValueError, match='32'):
        model(random_tokens(1, 1), cache=cache)
    assert cache.length == 32                                               # what it held is still there
    with pytest.raises(ValueError, match='32'):
        model.generate(random_tokens(1, 30), 10, context=64)


@pytest.mark.parametrize('name', [name for name in (*SCHEMES, *SCALINGS) if name != 'learned'])
@torch.no_grad()
def test_every_other_scheme_reads_eight_times_its_block_size(name):
    logits = all_logits(small_model(name, std=0.2), random_tokens(1, 8 * 32))
    assert logits.shape == (1, 256, 17) and logits.isfinite().all()


def test_a_cache_of_another_batch_size_is_refused():
    model = small_model('rope')
    with pytest.raises(ValueError, match='for a batch of 2'):
        model(random_tokens(3, 5), cache=model.make_cache(2))


@pytest.mark.parametrize('options, word', [
    (dict(temperature=-1), 'temperature'), (dict(temperature=math.nan), 'temperature'), (dict(top_k=0), 'top_k'), (dict(top_p=0.0), 'top_p'),
    (dict(top_p=1.5), 'top_p'), (dict(context=0), 'context'), (dict(context=-3), 'context'), (dict(max_new_tokens=-1), 'max_new_tokens')])
def test_generation_refuses_what_makes_no_sense(options, word):
    model = small_model('rope')
    with pytest.raises(ValueError, match=word):
        model.generate(random_tokens(1, 3), **{'max_new_tokens': 2, **options})
    with pytest.raises(ValueError, match='begin'):
        model.generate(random_tokens(1, 0), 2)


def test_padding_of_the_vocabulary_is_never_sampled():
    """65 real tokens of 128, all equally likely: without vocab_size about half of what is sampled would be no token."""
    model = small_model('rope', vocab_size=128)
    torch.nn.init.zeros_(model.lm_head.weight)
    for options in (dict(), dict(top_k=100), dict(top_p=0.99), dict(temperature=0)):
        text = model.generate(torch.zeros(4, 1, dtype=torch.int64), 50, vocab_size=65, **options)
        assert text.max() < 65
    assert model.generate(torch.zeros(4, 1, dtype=torch.int64), 50).max() >= 65


def test_generated_tokens_can_be_trained_on():
    model = small_model('rope').train()
    text = model.generate(random_tokens(2, 3), 10)
    model(text[:, :-1], text[:, 1:])[1].backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_top_k_keeps_k_of_equals():
    tokens = choose(torch.zeros(1, 17).expand(200, -1), top_k=1)
    assert len(set(tokens[:, 0].tolist())) == 1
    assert len(set(choose(torch.zeros(1, 17).expand(500, -1), top_k=3)[:, 0].tolist())) == 3


def test_a_model_that_is_not_causal_has_no_cache():
    """A new token would change what all earlier ones computed."""
    with pytest.raises(ValueError, match='causal'):
        small_model('rope', causal=False).make_cache(1)


# ----------------------------------------------------------------------------------------------------------------------
# generation, beside the definition in stream()'s docstring, written without a cache

@torch.no_grad()
def generate_slowly(model, idx, max_new_tokens, context, **options):
    """
    When the text outgrows the window of `context` tokens, the window's beginning moves to the last context // 2 tokens; else it
    stays. Each token is predicted from what the window holds, read from position 0.
    """
    start = max(0, idx.size(1) - context)
    for _ in range(max_new_tokens):
        if idx.size(1) - start > context:
            start = idx.size(1) - max(context // 2, 1)
        window = idx[:, start:]
        assert context // 2 <= window.size(1) <= context or start == 0
        logits, _ = model(window)
        idx = torch.cat((idx, choose(logits[:, -1], **options)), dim=1)
    return idx


@pytest.mark.parametrize('prompt', [1, 32, 50])
@pytest.mark.parametrize('name', [*SCHEMES, *SCALINGS])
def test_generate_equals_its_definition(name, prompt):
    """Past the window several times, from prompts shorter than it, as long, and longer; greedily, and by sampling."""
    model, idx = small_model(name, std=0.3), random_tokens(2, prompt)
    assert torch.equal(model.generate(idx, 50, temperature=0), generate_slowly(model, idx, 50, context=32, temperature=0))
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    found = model.generate(idx, 50, temperature=0.9, top_k=9, top_p=0.95, generator=generators[0])
    expected = generate_slowly(model, idx, 50, 32, temperature=0.9, top_k=9, top_p=0.95, generator=generators[1])
    assert torch.equal(found, expected) and found.shape == (2, prompt + 50)


@pytest.mark.parametrize('context', [1, 2, 7, 48])
@pytest.mark.parametrize('name', ['none', 'rope', 'alibi', 'yarn', 'dynamic'])
def test_context_sets_the_window(name, context):
    """Narrower than block_size, or, for schemes that go on, wider."""
    model, idx = small_model(name, std=0.3), random_tokens(2, 40)
    found = model.generate(idx, 40, temperature=0, context=context)
    assert torch.equal(found, generate_slowly(model, idx, 40, context, temperature=0))


def test_a_wider_context_really_sees_further():
    """The same last 32 tokens after different beginnings: the default window cannot tell them apart, a wider one can."""
    model = small_model('alibi', std=0.3)
    idx, generator = random_tokens(4, 60), torch.Generator()
    other = torch.cat((random_tokens(4, 28, seed=8), idx[:, 28:]), dim=1)

    def continuation(text, context):
        return model.generate(text, 30, context=context, generator=generator.manual_seed(0))[:, 60:]
    assert torch.equal(continuation(idx, None), continuation(other, None))
    assert not torch.equal(continuation(idx, 120), continuation(other, 120))


def test_a_token_costs_the_same_however_much_has_been_generated():
    """Tokens that pass through the blocks: about two for each that is generated, and the cache never outgrows the window."""
    model, seen = small_model('rope'), []
    model.transformer.h[1].register_forward_hook(lambda block, inputs, output: seen.append(output.size(1)))
    model.generate(random_tokens(1, 1), 400)
    assert len(seen) == 400 and max(seen) == 16 and sum(seen[:200]) <= 2 * 200 and sum(seen[200:]) <= 2 * 200


def test_stream_yields_the_tokens_of_generate_one_by_one():
    model, idx = small_model('rope', std=0.3), random_tokens(2, 5)
    stream = model.stream(idx, 50, generator=torch.Generator().manual_seed(3))
    tokens = list(itertools.islice(stream, 10))
    assert [token.shape for token in tokens] == [(2, 1)] * 10
    tokens += stream
    expected = model.generate(idx, 50, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([idx, *tokens], dim=1), expected)


def test_a_private_generator_makes_text_reproducible():
    """The same seed gives the same text, whatever the global generator has been used for, and leaves that one alone."""
    model, idx = small_model('rope', std=0.1), random_tokens(1, 5)
    torch.manual_seed(1)
    first = model.generate(idx, 40, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = model.generate(idx, 40, generator=torch.Generator().manual_seed(7))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, model.generate(idx, 40, generator=torch.Generator().manual_seed(8)))


def test_no_new_tokens_leave_the_text_as_it_is():
    idx = random_tokens(2, 5)
    assert torch.equal(small_model('rope').generate(idx, 0), idx)


# ----------------------------------------------------------------------------------------------------------------------
# choosing a token

def chosen_shares(logits, draws=20000, **options):
    """How often each token is chosen: (vocab_size,)."""
    tokens = choose(logits.expand(draws, -1), generator=torch.Generator().manual_seed(0), **options)
    assert tokens.shape == (draws, 1)
    return torch.bincount(tokens[:, 0], minlength=logits.numel()) / draws


def shares_by_definition(logits, temperature=1.0, top_k=None, top_p=None):
    """softmax(logits / temperature), then the k likeliest, then the fewest of these that hold p; the rest 0, the sum 1."""
    weights = [math.exp(logit / temperature) for logit in logits.tolist()]
    kept = sorted(range(len(weights)), key=lambda token: -weights[token])[:top_k]
    total, held, fewest = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if fewest and top_p is not None and held >= top_p:                  # one token stays in any case
            break
        fewest.append(token)
        held += weights[token] / total
    shares = torch.tensor([weights[token] if token in fewest else 0.0 for token in range(len(weights))])
    return shares / shares.sum()


@pytest.mark.parametrize('options', [
    dict(), dict(temperature=0.5), dict(temperature=2.0), dict(top_k=1), dict(top_k=3), dict(top_k=100), dict(top_p=0.5), dict(top_p=0.9),
    dict(top_p=1.0), dict(top_p=1e-9), dict(top_k=4, top_p=0.7), dict(temperature=0.7, top_k=5, top_p=0.95)])
def test_tokens_are_chosen_as_often_as_their_options_say(options):
    logits = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.7, -3.0, 1.9, 0.0])
    found, expected = chosen_shares(logits, **options), shares_by_definition(logits, **options)
    assert (found[expected == 0] == 0).all()                                # nothing that is excluded
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)         # four standard deviations of 20,000 draws


def test_temperature_0_is_argmax_and_draws_no_random_number():
    logits = torch.randn(50, 17)
    before = torch.get_rng_state()
    assert torch.equal(choose(logits, temperature=0, top_k=5, top_p=0.5), logits.argmax(dim=-1, keepdim=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_each_row_is_chosen_by_its_own_logits():
    logits = torch.full((17, 17), -100.0).fill_diagonal_(0.0)
    for options in (dict(), dict(top_k=3), dict(top_p=0.9)):
        assert choose(logits, **options)[:, 0].tolist() == list(range(17))
