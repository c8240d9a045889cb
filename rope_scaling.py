"""
RoPE's context extensions: how a model that was trained on L tokens is made to read `factor` times as many.

Beyond L, RoPE's slow waves come to angles that training has never shown. All of these slow them down, so that
factor * L tokens turn them as far as L tokens did; they differ in what becomes of the fast waves, which tell
neighbours apart.

    linear     all waves / factor: positions are squeezed (Chen 2023, position interpolation)
    ntk        a larger base: the slowest wave / factor, the fastest kept, gradually between (bloc97 2023)
    dynamic    as ntk, with a factor that grows with the text at hand; up to L tokens nothing changes
    yarn       wave by wave kept, blended or divided, and warmer scores (Peng 2023; its official code's ramp)
    llama3     kept, blended or divided by other rules, scores as they were (Llama 3.1's code)
"""
import math

import torch

ROPE_SCALINGS = ('none', 'linear', 'ntk', 'dynamic', 'yarn', 'llama3')


def rescale(theta, base, scaling='none', factor=1.0, original_length=None, length=None,
            beta_fast=32.0, beta_slow=1.0, attention_factor=None):
    """
    RoPE's frequencies for a longer context, and what cos and sin are multiplied by.

    theta             base^(-2i/d), d = head_size, in radians per token: (d / 2,), fast waves first
    original_length   L; needed by dynamic, yarn and llama3
    length            tokens in the present text; only dynamic looks at it
    attention_factor  given, it wins over the formula
    Returns (the new theta, a float). ValueError, with one sentence, for options that make no sense.
    """
    if scaling not in ROPE_SCALINGS:
        raise ValueError(f'rope_scaling must be one of {", ".join(ROPE_SCALINGS)}, not {scaling!r}')
    if factor < 1:
        raise ValueError(f'rope_factor must be at least 1, not {factor}')
    if factor > 1 and scaling == 'none':
        raise ValueError(f'rope_factor {factor} has no effect without a rope_scaling: choose one of '
                         f'{", ".join(ROPE_SCALINGS[1:])}')
    if scaling in ('ntk', 'dynamic') and len(theta) == 1:
        raise ValueError(f'rope_scaling {scaling} needs a head size above 2')
    if scaling in ('dynamic', 'yarn', 'llama3') and not original_length:
        raise ValueError(f'rope_scaling {scaling} needs the original length that the model was trained at')
    if beta_fast <= beta_slow:
        raise ValueError('yarn_beta_fast must be above yarn_beta_slow '
                         f'({beta_fast} is not above {beta_slow})')

    if scaling == 'linear':
        theta = theta / factor
    elif scaling == 'ntk':
        theta = ntk(theta, factor)
    elif scaling == 'dynamic':
        theta = ntk(theta, dynamic_factor(factor, original_length, length or 0))
    elif scaling == 'yarn':
        theta = yarn(theta, base, factor, original_length, beta_fast, beta_slow)
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1   # the paper's sqrt(1/t): scores grow by its square
    elif scaling == 'llama3':
        theta = llama3(theta, factor, original_length)
    return theta, 1.0 if attention_factor is None else float(attention_factor)


def ntk(theta, factor):
    """
    What the base  base * factor^(d/(d-2))  makes of theta: theta_i * factor^(-2i/(d-2)). So the fastest wave,
    i = 0, is kept, and the slowest, i = d/2 - 1, is divided by factor exactly: that is where d/(d-2) is from.

    >>> ntk(torch.ones(4), 4.0)
    tensor([1.0000, 0.6300, 0.3969, 0.2500])
    """
    pair = torch.arange(len(theta), dtype=theta.dtype, device=theta.device)
    return theta * factor ** (-pair / (len(theta) - 1))


def dynamic_factor(factor, original_length, length):
    """ntk's factor for a text of `length` tokens: 1 up to L, then growing by `factor` with every L."""
    return factor * max(length, original_length) / original_length - (factor - 1)


def yarn(theta, base, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    """
    Within L tokens pair i turns L theta_i / (2 pi) times. Three bands of pairs:

        kept       turns > beta_fast   they tell near tokens apart, and have seen every angle in training
        blended    in between          a straight ramp over the pair index
        divided    turns < beta_slow   not even one turn in training: slowed, so as to meet no new angle
    """
    d = 2 * len(theta)

    def pair_that_turns(times):     # L base^(-2i/d) / (2 pi) = times, solved for i, which need not be whole
        return d * math.log(original_length / (2 * math.pi * times)) / (2 * math.log(base))
    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = max(min(math.ceil(pair_that_turns(beta_slow)), d - 1), low)  # below low the ramp would turn round
    pair = torch.arange(len(theta), dtype=theta.dtype, device=theta.device)
    ramp = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)              # 0 kept .. 1 divided
    return theta * (1 - ramp) + theta / factor * ramp


def llama3(theta, factor, original_length):
    """
    Waves that turn 4 times or more within L tokens are kept, those that turn once or less are divided, those
    between are blended. 4 and 1 are high_freq_factor and low_freq_factor in Llama 3.1's published config.
    """
    turns = original_length * theta / (2 * math.pi)                         # L / wavelength
    keep = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return theta * keep + theta / factor * (1 - keep)
