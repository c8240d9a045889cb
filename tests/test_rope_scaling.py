"""RoPE's context extensions: reference numbers, the three bands, the temperature, and that asking for one really changes a model."""
import math
import re

import pytest
import torch

from conftest import SCALINGS, SIZES, all_logits, random_tokens, reference_values, small_model
from model import GPT, GPTConfig, rope_frequencies, wave_frequencies
from runs import make_model

REFERENCE = reference_values()
HF, CLOSED_FORM = REFERENCE['hf'], REFERENCE['closed_form']
SCALED = [entry for entry in HF if re.match('linear|dynamic|yarn|llama3', entry)]
YARN = dict(base=1e4, scaling='yarn', factor=4.0, original_length=2048)     # with a head size of 64, the table of the tutorial below


def theta(frequencies_and_factor):
    return frequencies_and_factor[0].double()


def options_of(entry):
    """The name of a reference entry as arguments of rope_frequencies: yarn_dim64_base10000_L2048_s4 and the like."""
    number = {key: float(value) for key, value in re.findall(r'_(dim|base|L|s|factor|n)(\d+)', entry.replace('attention_factor', ''))}
    return dict(head_size=int(number['dim']), base=number['base'], scaling=entry.split('_')[0], length=number.get('n'),
                factor=number.get('factor', number.get('s')), original_length=number.get('L'))


# ----------------------------------------------------------------------------------------------------------------------
# numbers

@pytest.mark.parametrize('entry', SCALED)
def test_scaled_frequencies_have_the_reference_values(entry):
    options, expected = options_of(entry), HF[entry]
    if 'explicit_attention_factor' in entry:
        options['attention_factor'] = expected['attention_factor']
    frequencies, attention_factor = rope_frequencies(**options)
    assert frequencies.dtype == torch.float32 and isinstance(attention_factor, float)
    torch.testing.assert_close(frequencies.double(), torch.tensor(expected['inv_freq'], dtype=torch.float64), rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(expected.get('attention_factor', 1.0), rel=1e-9)


@pytest.mark.parametrize('entry, size, base, factor', [('ntk_aware_dim64_base10000_s4', 64, 1e4, 4.0),
                                                       ('ntk_aware_dim128_base500000_s16', 128, 5e5, 16.0)])
def test_ntk_frequencies_have_the_reference_values(entry, size, base, factor):
    frequencies, attention_factor = rope_frequencies(size, base, 'ntk', factor)
    expected = torch.tensor(CLOSED_FORM[entry]['inv_freq'], dtype=torch.float64)
    torch.testing.assert_close(frequencies.double(), expected, rtol=1e-6, atol=0)
    assert attention_factor == 1


@pytest.mark.parametrize('factor, length, base', [(1, 4096, 20452.2287), (2, 4096, 31082.2367),
                                                  (1, 2048, 1e4), (4, 100, 1e4), (2, None, 1e4)])
def test_dynamic_ntk_takes_its_base_from_the_length(factor, length, base):
    frequencies, _ = rope_frequencies(64, 1e4, 'dynamic', factor, original_length=2048, length=length)
    torch.testing.assert_close(frequencies.double(), wave_frequencies(64, base), rtol=1e-6, atol=0)


def test_llama3_blends_between_one_and_four_turns():
    """Ratios at pairs 29 to 35 of Llama 3.1's own settings; kept before, divided behind."""
    ratio = theta(rope_frequencies(128, 5e5, 'llama3', 8.0, original_length=8192)) / wave_frequencies(128, 5e5)
    expected = torch.tensor([.82817, .64374, .49351, .37112, .27143, .19021, .125], dtype=torch.float64)
    torch.testing.assert_close(ratio[29:36], expected, rtol=0, atol=1e-5)
    turns = 8192 * wave_frequencies(128, 5e5) / (2 * math.pi)
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]), rtol=1e-6, atol=0)
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8), rtol=1e-6, atol=0)


def test_yarn_is_not_the_tutorials_yarn():
    """The class that goes round in tutorials raises the base and divides positions: fast waves, which must stay, are divided by s."""
    yarn = theta(rope_frequencies(64, **YARN))
    expected = {0: 1.0, 8: 0.1, 12: 0.02432521, 16: 0.005384615, 24: 0.00025}
    for pair, value in expected.items():
        assert yarn[pair] == pytest.approx(value, rel=1e-6)
    tutorial = torch.tensor(CLOSED_FORM['WRONG_tutorial_yarn_dim64_base10000_s4'], dtype=torch.float64)
    assert (yarn / tutorial > 2).all()                                      # it stretches everything, also what must stay
    assert tutorial[0] == 0.25 and tutorial[-1] == pytest.approx(wave_frequencies(64)[-1].item() / 16, rel=1e-6)   # by s, up to s^2


# ----------------------------------------------------------------------------------------------------------------------
# the bands

# (head size, base, original length, factor), down to the lengths at which small models are trained
BANDS = [(64, 1e4, 2048, 4.0), (64, 1e4, 256, 4.0), (64, 1e4, 128, 8.0), (64, 1e4, 64, 2.0), (32, 1e4, 64, 4.0), (16, 1e4, 32, 4.0),
         (128, 5e5, 8192, 16.0)]


@pytest.mark.parametrize('size, base, length, factor', BANDS)
def test_yarn_keeps_blends_and_divides(size, base, length, factor):
    """theta'/theta is 1 up to `low`, 1/s from `high` on, falls in between, and is a straight ramp over the pair index."""
    original = wave_frequencies(size, base).float().double()
    frequencies = theta(rope_frequencies(size, base, 'yarn', factor, original_length=length))
    ratio = frequencies / original
    low = max(math.floor(size * math.log(length / (2 * math.pi * 32)) / (2 * math.log(base))), 0)
    high = min(math.ceil(size * math.log(length / (2 * math.pi * 1)) / (2 * math.log(base))), size - 1)
    assert torch.equal(frequencies[:low + 1], original[:low + 1])
    torch.testing.assert_close(ratio[high:], torch.full_like(ratio[high:], 1 / factor), rtol=1e-6, atol=0)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(1 / factor, rel=1e-6)
    assert (ratio.diff() < 1e-6).all()
    step = (1 - 1 / factor) / (high - low)
    torch.testing.assert_close(ratio[low:high + 1].diff(), torch.full_like(ratio[low:high], -step), rtol=1e-3, atol=1e-6)


def test_yarns_bands_at_the_reference_settings():
    ratio = theta(rope_frequencies(64, **YARN)) / wave_frequencies(64).float().double()
    assert (ratio[:9] == 1).all() and (ratio[9:] < 1).all()                 # low 8
    torch.testing.assert_close(ratio[21:], torch.full_like(ratio[21:], 0.25), rtol=1e-6, atol=0)    # high 21
    assert (ratio[:21] > 0.25 + 1e-3).all()


@pytest.mark.parametrize('length', [64, 128, 256])
def test_yarn_keeps_only_the_first_pair_of_a_short_model(length):
    ratio = theta(rope_frequencies(64, original_length=length, scaling='yarn', factor=4.0)) / wave_frequencies(64)
    assert ratio[0] == 1 and (ratio[1:] < 0.99).all()


def test_yarn_divides_all_waves_but_the_first_where_none_turns_often_enough():
    """Where both ends of the ramp lie before the first pair it must not run backwards, which would keep what it should divide."""
    ratio = theta(rope_frequencies(64, scaling='yarn', factor=4.0, original_length=64, beta_slow=20.0)) / wave_frequencies(64)
    torch.testing.assert_close(ratio[1:], torch.full_like(ratio[1:], 0.25), rtol=1e-6, atol=0)
    ratio = theta(rope_frequencies(64, scaling='yarn', factor=4.0, original_length=3)) / wave_frequencies(64)
    torch.testing.assert_close(ratio[1:], torch.full_like(ratio[1:], 0.25), rtol=1e-6, atol=0)


def test_yarn_keeps_all_waves_where_all_turn_often_enough():
    ratio = theta(rope_frequencies(16, 100.0, 'yarn', 4.0, original_length=10 ** 7)) / wave_frequencies(16, 100.0)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-6, atol=0)


def test_linear_divides_all_waves_and_ntk_divides_the_slowest_alone():
    original = wave_frequencies(64)
    linear, ntk = (theta(rope_frequencies(64, scaling=scaling, factor=4.0)) / original for scaling in ('linear', 'ntk'))
    torch.testing.assert_close(linear, torch.full_like(linear, 0.25), rtol=1e-6, atol=0)
    assert ntk[0] == 1 and ntk[-1] == pytest.approx(0.25, rel=1e-6) and (ntk.diff() < 0).all()


@pytest.mark.parametrize('scaling', SCALINGS)
def test_a_factor_of_one_changes_nothing(scaling):
    frequencies, attention_factor = rope_frequencies(16, scaling=scaling, factor=1.0, original_length=64)
    torch.testing.assert_close(frequencies, rope_frequencies(16)[0], rtol=1e-6, atol=0)
    assert attention_factor == 1


# ----------------------------------------------------------------------------------------------------------------------
# the temperature

@pytest.mark.parametrize('factor, expected', [(1.0, 1.0), (4.0, 1.138629), (16.0, 1.277259)])
def test_yarn_lengthens_cos_and_sin_once(factor, expected):
    model = small_model('yarn', rope_factor=factor)
    cos, sin = model.transformer.wpe.angles(torch.arange(3), torch.arange(3))
    torch.testing.assert_close((cos ** 2 + sin ** 2).sqrt(), torch.full_like(cos, expected), rtol=1e-6, atol=0)


def test_yarn_multiplies_scores_by_the_square_of_its_factor():
    """Against the same frequencies without a temperature: (q . k) grows by mscale^2, 1.296477 at s = 4."""
    q, k = torch.randn(1, 6, 3, 8), torch.randn(1, 6, 3, 8)

    def scores(**options):
        position = small_model('yarn', **options).transformer.wpe
        angles = position.angles(torch.arange(6), torch.arange(6))
        return torch.einsum('bqhd,bkhd->bhqk', *position.turn(q, k, angles, 0))
    torch.testing.assert_close(scores(), 1.2964769927807063 * scores(rope_attention_factor=1.0))


def test_an_explicit_attention_factor_wins_over_the_formula():
    assert rope_frequencies(64, **YARN, attention_factor=1.5)[1] == 1.5
    assert rope_frequencies(64, attention_factor=1.5)[1] == 1.5
    assert small_model('yarn', rope_attention_factor=1.5).transformer.wpe.attention_factor == 1.5
    idx = random_tokens(1, 20)
    assert not torch.allclose(all_logits(small_model('yarn', std=0.2), idx),
                              all_logits(small_model('yarn', std=0.2, rope_attention_factor=1.5), idx), atol=1e-2)


# ----------------------------------------------------------------------------------------------------------------------
# state

@pytest.mark.parametrize('scaling', SCALINGS)
def test_a_long_input_does_not_change_what_a_later_short_one_gets(scaling):
    model, short, long = small_model(scaling, std=0.2), random_tokens(1, 10), random_tokens(1, 100)
    before = all_logits(model, short)
    all_logits(model, long)
    assert torch.equal(all_logits(model, short), before)


@pytest.mark.parametrize('scaling', SCALINGS)
def test_a_scaling_asked_for_at_load_time_changes_frequencies_and_logits(scaling):
    """A checkpoint of plain RoPE, opened with a scaling: as if the scaling had been there from the start, and not as without it."""
    plain = small_model('rope', std=0.2)
    checkpoint = dict(model=plain.state_dict(), model_args={**SIZES, 'position': 'rope'})
    scaled = make_model(checkpoint, 'ckpt.pt', **SCALINGS[scaling]).eval()
    from_the_start = small_model(scaling, std=0.2)
    idx = random_tokens(1, 40)
    assert (all_logits(scaled, idx) - all_logits(plain, idx))[:, -1].abs().max() > 1e-2
    assert torch.equal(all_logits(scaled, idx), all_logits(from_the_start, idx))
    unscaled_at_rest = scaling == 'dynamic'                                 # changes beyond the original length only
    assert torch.equal(scaled.transformer.wpe.frequencies, plain.transformer.wpe.frequencies) == unscaled_at_rest


@pytest.mark.parametrize('scaling', ['none', *SCALINGS])
def test_changing_only_the_maximum_length_changes_nothing(scaling):
    options = SCALINGS.get(scaling, dict(position='rope'))
    short, long = (GPT(GPTConfig(**{**SIZES, **options, 'block_size': block_size})).transformer.wpe for block_size in (32, 4096))
    assert torch.equal(short.frequencies, long.frequencies) and short.attention_factor == long.attention_factor


def test_the_original_length_is_the_block_size_unless_given():
    from_block_size = small_model('yarn', block_size=64, rope_original_length=None)
    given = small_model('yarn', block_size=512, rope_original_length=64)
    other = small_model('yarn', block_size=4096, rope_original_length=None)
    assert torch.equal(from_block_size.transformer.wpe.frequencies, given.transformer.wpe.frequencies)
    assert not torch.equal(other.transformer.wpe.frequencies, given.transformer.wpe.frequencies)


def test_dynamic_is_plain_rope_up_to_its_original_length_and_not_beyond():
    dynamic, plain, idx = small_model('dynamic', std=0.2), small_model('rope', std=0.2), random_tokens(2, 17)
    assert torch.equal(all_logits(dynamic, idx[:, :16]), all_logits(plain, idx[:, :16]))
    assert not torch.allclose(all_logits(dynamic, idx), all_logits(plain, idx), atol=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# errors

@pytest.mark.parametrize('arguments, word', [
    (dict(scaling='longrope'), 'longrope'),
    (dict(scaling='yarn', factor=0.5, original_length=64), 'rope_factor'),
    (dict(scaling='yarn', factor=4.0), 'original length'),
    (dict(scaling='dynamic', factor=4.0), 'original length'),
    (dict(scaling='llama3', factor=4.0), 'original length'),
])
def test_rope_frequencies_refuses(arguments, word):
    with pytest.raises(ValueError, match=word):
        rope_frequencies(64, **arguments)


@pytest.mark.parametrize('position', ['none', 'learned', 'sinusoidal', 'shaw', 'alibi', 't5', 'tupe'])
def test_a_scaling_on_another_scheme_is_refused(position):
    with pytest.raises(ValueError, match='RoPE only'):
        GPTConfig(position=position, rope_scaling='yarn', rope_factor=4.0)
