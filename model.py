"""
A GPT in one file, and eight ways to tell it the order of its tokens.

Attention by itself sees a set: shuffle the tokens and the outputs are shuffled along, nothing else changes. Order has to be let in,
and there are three doors for it. Each scheme below uses one of them, and its class shows only what it does there:

    door 1, embeddings        a vector per position is added to the token embeddings, once        learned, sinusoidal
    door 2, queries and keys  both are turned by an angle that grows with position, each layer     rope
    door 3, scores            a bias is added to the scores before the softmax, each layer         shaw, t5, alibi, tupe

The rest is GPT-2 as nanoGPT has it, with the same parameter names, so that nanoGPT's checkpoints load as position='learned'.

Shapes in the comments: B batch, T tokens (Tq as queries, Tk as keys), C = n_embd, nh = n_head, hs = C / nh, the size of a head.
"""
import functools
import inspect
import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Everything that defines a model. ValueError, with one sentence, for values that make none."""
    block_size: int = 1024              # longest training sequence, in tokens
    vocab_size: int = 50304             # GPT-2's 50257, padded to a multiple of 64 for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True                   # biases in Linear and LayerNorm, as in GPT-2
    gelu: str = 'exact'                 # 'exact', or 'tanh', the approximation that OpenAI's and Hugging Face's GPT-2 use
    causal: bool = True                 # a token sees itself and what came before; False: everything, as in BERT
    flash: bool = True                  # fused attention; False: the five lines written out
    position: str = 'learned'           # none learned sinusoidal shaw rope alibi t5 tupe
    sinusoidal_base: float = 10000.0    # wavelengths run from 2 pi to nearly 2 pi base
    sinusoidal_scale: float = 0.02      # the sinusoids are multiplied by this: see class Sinusoidal
    shaw_max_distance: int = 16         # the paper's k; keys further away than k share a row
    shaw_values: bool = False           # a^V as well as a^K; needs the written-out path, and the paper's ablation finds no gain
    rope_base: float = 10000.0          # wavelengths run from 2 pi to nearly 2 pi base
    rope_layout: str = 'half'           # pairs (i, i + hs/2), or 'interleaved': (2i, 2i+1)
    rope_scaling: str = 'none'          # none linear ntk dynamic yarn llama3: see rope_frequencies
    rope_factor: float = 1.0            # length wanted / length trained
    rope_original_length: int = None    # length trained, in tokens; None: block_size
    rope_attention_factor: float = None # multiplies cos and sin; None: YaRN's formula for yarn, 1 for the others
    yarn_beta_fast: float = 32.0        # pairs that turn more often than this within the trained length are kept,
    yarn_beta_slow: float = 1.0         # those that turn less often than this are divided by the factor
    t5_buckets: int = 32
    t5_max_distance: int = 128          # distances from here on share the last bucket

    def __post_init__(self):
        def need(condition, sentence):
            if not condition:
                raise ValueError(sentence)

        def need_choice(name, choices):
            value = getattr(self, name)
            need(value in choices, f'{name} must be one of {", ".join(choices)}, not {value!r}')

        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            number = field.type in (int, float)
            right = isinstance(value, (int, float) if field.type is float else field.type)
            if number:                                  # True is an int to Python; nan is below nothing
                right = right and not isinstance(value, bool) and abs(value) < 1e300
            need(right, f'{field.name} must be of type {field.type.__name__}, not {value!r}')
            if number and field.name not in ('dropout', 'sinusoidal_scale'):
                need(value > 0, f'{field.name} must be positive, not {value}')
        need(0 <= self.dropout < 1, f'dropout must be in [0, 1), not {self.dropout}')
        need_choice('position', SCHEMES)
        need_choice('gelu', ('exact', 'tanh'))
        need_choice('rope_layout', ('half', 'interleaved'))
        need_choice('rope_scaling', ROPE_SCALINGS)
        need(self.n_embd % self.n_head == 0, f'n_embd {self.n_embd} must be a multiple of n_head {self.n_head}')
        if self.position in ('sinusoidal', 'tupe'):
            need(self.n_embd % 2 == 0, f'sinusoids come in pairs: n_embd must be even, not {self.n_embd}')
        if self.position == 'rope':
            need(self.n_embd // self.n_head % 2 == 0,
                 f'RoPE turns pairs: the head size n_embd / n_head must be even, not {self.n_embd // self.n_head}')
            need(self.rope_scaling not in ('ntk', 'dynamic') or self.n_embd // self.n_head > 2,
                 f'rope_scaling {self.rope_scaling} needs a head size above 2')
            need(self.rope_base > 1, f'rope_base must be above 1, not {self.rope_base}')
        else:
            need(self.rope_scaling == 'none', f'rope_scaling extends RoPE only: it cannot be used with position {self.position!r}')
        need(self.rope_factor >= 1, f'rope_factor must be at least 1, not {self.rope_factor}')
        need(self.rope_factor == 1 or self.rope_scaling != 'none',
             f'rope_factor {self.rope_factor} has no effect without a rope_scaling: choose one of {", ".join(ROPE_SCALINGS[1:])}')
        need(self.yarn_beta_fast > self.yarn_beta_slow, 'yarn_beta_fast must be above yarn_beta_slow '
             f'({self.yarn_beta_fast} is not above {self.yarn_beta_slow})')
        if self.position == 't5':
            smallest = 2 if self.causal else 4
            need(self.t5_buckets >= smallest and self.t5_buckets % smallest == 0,
                 f't5_buckets must be a multiple of {smallest}, not {self.t5_buckets}')
            exact = self.t5_buckets // smallest
            need(self.t5_max_distance > exact,
                 f't5_max_distance must be above {exact}, the distances with a bucket of their own, not {self.t5_max_distance}')


# ----------------------------------------------------------------------------------------------------------------------
# The position schemes. The first class is position='none' and the interface: three doors that stay shut unless overridden.

class Position(nn.Module):
    """
    No positions at all ("NoPE"). With a causal mask two layers still learn order, from what each token can see (Kazemnejad 2023).

    Every door is told absolute positions, (Tq,) of the queries and (Tk,) of the keys, so that training, a cache that has read Tk - Tq
    tokens before, and lengths beyond the trained one are the same code. What all layers share is made once per forward pass, by
    prepare(), and handed to doors 2 and 3 in each layer.
    """
    recomputes_from = math.inf          # longer sequences than this change what earlier tokens get: see RoPE, dynamic

    def __init__(self, config):
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.score_scale = 1 / math.sqrt(self.head_size)

    def embedding(self, positions):
        """Door 1. What is added to the token embeddings: (T, C), or None."""
        return None

    def prepare(self, queries, keys, mask):
        """
        What every layer needs, from the positions and the mask, (Tq, Tk), float: 0 where a query may look, -inf where not. Returns two
        things: `angles` for door 2; and `pairs` for door 3, (1, 1 or nh, Tq, Tk), or None, and then that door stays shut.
        """
        return None, None

    def turn(self, x, angles):
        """Door 2. The queries or the keys of one layer, (B, T, nh, hs), in the same shape."""
        return x

    def bias(self, q, pairs, layer):
        """
        Door 3. What is added to the scores, the mask included: (1 or B, 1 or nh, Tq, Tk), float32. q: (B, nh, Tq, hs). On a CPU the door
        is asked block by block: for some of the queries, and the part of `pairs` that is theirs.
        """
        return pairs

    def values(self, weights, pairs, layer):
        """What Shaw's a^V adds to the output of attention: (B, nh, Tq, hs), or None. weights, after softmax: (B, nh, Tq, Tk)."""
        return None


class Learned(Position):
    """One trained vector per position, added to the embedding (Gehring 2017; GPT-2). The table has an end: block_size."""

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.block_size, config.n_embd))       # nanoGPT's transformer.wpe.weight

    def prepare(self, queries, keys, mask):
        if len(keys) > len(self.weight):
            raise ValueError(f'the learned position table ends at {len(self.weight)} tokens (block_size), so it cannot read {len(keys)}')
        return None, None

    def embedding(self, positions):
        return self.weight[positions]


class Sinusoidal(Position):
    """
    Waves of many lengths, read at the token's position and added to its embedding (Vaswani 2017, section 3.5).

    The sum only makes sense if both parts are of like size. The paper multiplies embeddings of std 1/sqrt(d) by sqrt(d): RMS 1 beside the
    sinusoids' 0.707. GPT-2's embeddings have std 0.02, so we multiply the sinusoids by 0.02 instead, which keeps the paper's ratio and
    the size that learned tables start from; unscaled they would drown the tokens 35 to 1. README.md has what each choice costs.
    """

    def __init__(self, config):
        super().__init__(config)
        self.n_embd, self.base, self.scale = config.n_embd, config.sinusoidal_base, config.sinusoidal_scale

    def embedding(self, positions):
        return sinusoidal_table(positions, self.n_embd, self.base) * self.scale


class RoPE(Position):
    """
    Rotary positions (Su 2021): pair i of every query and key is turned by the angle position * theta_i. Turning q by m * theta and k by
    n * theta changes their product only through (m - n) * theta: absolute positions go in, relative ones come out. Values stay
    unturned: what is said does not depend on where. Keys are cached after turning: a key's own position never changes.

    rope_scaling='dynamic' is the exception: beyond the original length each new token changes theta for all, also for the keys and
    the deeper states already computed, so a cache has to be read again from the first token (GPT.forward does so).
    """

    def __init__(self, config):
        super().__init__(config)
        self.options = dict(
            head_size=self.head_size, base=config.rope_base, scaling=config.rope_scaling, factor=config.rope_factor,
            original_length=config.rope_original_length or config.block_size, beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow, attention_factor=config.rope_attention_factor)
        # Plain attributes: a buffer would be rounded by model.to(bfloat16), and a frequency rounded to 8 bits is another frequency.
        self.frequencies, self.attention_factor = rope_frequencies(**self.options)
        self.layout = config.rope_layout
        if config.rope_scaling == 'dynamic':
            self.recomputes_from = self.options['original_length']

    def prepare(self, queries, keys, mask):
        frequencies = self.frequencies
        if len(keys) > self.recomputes_from:
            frequencies, _ = rope_frequencies(**self.options, length=len(keys))
        cos, sin = rotation(queries, frequencies, self.attention_factor, self.layout)  # (T, hs) each
        return (cos[:, None], sin[:, None]), None                                       # to fit (B, T, nh, hs)

    def turn(self, x, angles):
        return rotate(x, *angles, self.layout)


class ALiBi(Position):
    """
    The further, the less: score - m_h * |i - j|, with a fixed slope m_h per head and no parameters (Press 2022). With a causal mask
    m_h * j per key would do as well, since the softmax ignores what a row has in common, but in half precision that number loses the
    nearby distances that matter most; distances themselves lose nothing there.
    """

    def __init__(self, config):
        super().__init__(config)
        self.slopes = alibi_slopes(config.n_head)       # a plain attribute, as RoPE's frequencies

    def prepare(self, queries, keys, mask):
        distance = (queries[:, None] - keys[None, :]).abs()                             # (Tq, Tk)
        return None, (mask - self.slopes.to(mask.device)[:, None, None] * distance)[None]       # (1, nh, Tq, Tk)


class T5(Position):
    """A learned bias per head and bucket of distances, shared by all layers (Raffel 2020, section 2.1)."""

    def __init__(self, config):
        super().__init__(config)
        self.buckets, self.max_distance, self.causal = config.t5_buckets, config.t5_max_distance, config.causal
        self.table = nn.Parameter(torch.empty(config.t5_buckets, config.n_head))

    def prepare(self, queries, keys, mask):
        # A number for each distance that occurs, largest first. A query's row is a stretch of them, the first query's the last one.
        distances = queries[-1] - keys[0] - torch.arange(len(queries) + len(keys) - 1, device=keys.device)
        buckets = t5_bucket(distances, self.buckets, self.max_distance, self.causal)
        by_distance = F.embedding(buckets, self.table.float()).T.contiguous()           # (nh, Tq + Tk - 1)
        return None, (mask + by_distance.unfold(-1, len(keys), 1).flip(-2))[None]       # mask first: the sum lies row by row, as it does


class Shaw(Position):
    """
    Relative positions as vectors (Shaw 2018, equations 3 and 4): score = q_i . (k_j + a^K_{j-i}) / sqrt(hs), one table per layer, its
    rows shared by the heads, distances clipped at k. With shaw_values also z_i = sum_j weight_ij (v_j + a^V_{j-i}).
    """

    def __init__(self, config):
        super().__init__(config)
        self.k, self.causal = config.shaw_max_distance, config.causal
        rows = self.k + 1 if config.causal else 2 * self.k + 1          # j - i = -k..0, or -k..k
        self.a_k = nn.Parameter(torch.empty(config.n_layer, rows, self.head_size))
        self.a_v = nn.Parameter(torch.empty(config.n_layer, rows, self.head_size)) if config.shaw_values else None

    def prepare(self, queries, keys, mask):
        row = (keys[None, :] - queries[:, None]).clamp(-self.k, 0 if self.causal else self.k) + self.k
        row = row.masked_fill(mask < 0, self.a_k.size(1))       # a key not to be seen: a row behind the table's last, which bias() adds
        return None, row[None, None]                                                    # (1, 1, Tq, Tk)

    def bias(self, q, pairs, layer):
        products = q.float() @ self.a_k[layer].float().T * self.score_scale             # (B, nh, Tq, rows): q_i with every row
        products = F.pad(products, (0, 1), value=-math.inf)                             # -inf for what is not to be seen
        return products.gather(-1, pairs.expand(*q.shape[:2], -1, -1))                  # (B, nh, Tq, Tk): the row of j - i

    def values(self, weights, pairs, layer):
        if self.a_v is None:
            return None
        weights32 = weights.float()                     # the last row gathers many small weights, whose sum bfloat16 would lose
        by_row = weights32.new_zeros(*weights.shape[:3], self.a_v.size(1) + 1)          # (B, nh, Tq, rows + 1): the weight that each
        by_row = by_row.scatter_add(-1, pairs.expand_as(weights), weights32)            # row of the table gets in total
        return (by_row[..., :-1] @ self.a_v[layer].float()).to(weights.dtype)           # (B, nh, Tq, hs)


class TUPE(Position):
    """
    Untied positions (Ke 2021, equation 7, TUPE-A): positions get queries and keys of their own, and the two mixed terms that adding
    to the embeddings would bring (word-position, position-word) are left out as noise:

        score_ij = (x_i Wq . x_j Wk + p_i Uq . p_j Uk) / sqrt(2 hs)

    The positional half is the same for every token and every layer. p is the layer-normed sinusoidal table, so that it has no end;
    the paper's p is learned. Its rule for [CLS] has no place in a GPT.
    """

    def __init__(self, config):
        super().__init__(config)
        self.n_embd, self.n_head = config.n_embd, config.n_head
        self.score_scale = 1 / math.sqrt(2 * self.head_size)
        self.u_q = nn.Parameter(torch.empty(config.n_embd, config.n_embd))
        self.u_k = nn.Parameter(torch.empty(config.n_embd, config.n_embd))

    def prepare(self, queries, keys, mask):
        p = F.layer_norm(sinusoidal_table(keys, self.n_embd), (self.n_embd,))                       # (Tk, C)
        u_q, u_k = (u.float().view(self.n_head, self.head_size, self.n_embd) for u in (self.u_q, self.u_k))     # (nh, hs, C)
        q = p[-len(queries):] @ u_q.transpose(1, 2)                                                 # (nh, Tq, hs)
        # The same product, whichever way is less work: a single query behind a cache need not have all keys multiplied by U_k again.
        scores = q @ (u_k @ p.T) if len(queries) == len(keys) else q @ u_k @ p.T                    # (nh, Tq, Tk)
        return None, (scores * self.score_scale + mask)[None]                                       # (1, nh, Tq, Tk)


SCHEMES = {'none': Position, 'learned': Learned, 'sinusoidal': Sinusoidal, 'shaw': Shaw, 'rope': RoPE, 'alibi': ALiBi, 't5': T5,
           'tupe': TUPE}


# ----------------------------------------------------------------------------------------------------------------------
# What the schemes compute, each usable alone

def sinusoidal_table(positions, n_embd, base=10000.0):
    """
    PE[p, 2i] = sin(p / base^(2i/d)), PE[p, 2i+1] = cos(p / base^(2i/d)), d = n_embd (Vaswani 2017, section 3.5).

    positions: (T,), of any kind; computed in float32, or in float64 for float64 positions. Returns (T, n_embd).
    """
    if n_embd % 2:
        raise ValueError(f'sinusoids come in pairs: n_embd must be even, not {n_embd}')
    dtype = torch.float64 if positions.dtype == torch.float64 else torch.float32
    angles = positions.to(dtype)[:, None] * wave_frequencies(n_embd, base).to(positions.device, dtype)     # (T, n_embd / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)                 # sin and cos side by side


def wave_frequencies(size, base=10000.0):
    """theta_i = base^(-2i/size) for i = 0 .. size/2 - 1, in radians per token: (size / 2,), float64, on the CPU."""
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64, device='cpu') / size)


ROPE_SCALINGS = ('none', 'linear', 'ntk', 'dynamic', 'yarn', 'llama3')


def rope_frequencies(head_size, base=10000.0, scaling='none', factor=1.0, original_length=None, length=None,
                     beta_fast=32.0, beta_slow=1.0, attention_factor=None):
    """
    RoPE's angular frequencies theta_i, and what cos and sin are multiplied by.

    scaling           how to reach `factor` times the `original_length` that a model was trained at:
        none          theta_i = base^(-2i/d), d = head_size (Su 2021, section 3.2.2)
        linear        theta_i / factor: all waves stretched, all positions squeezed (Chen 2023, position interpolation)
        ntk           a larger base, base * factor^(d/(d-2)): the slowest wave stretched by factor, the fastest hardly (bloc97 2023)
        dynamic       as ntk, but with the base that the present `length` calls for; up to original_length nothing changes
        yarn          wave by wave: kept, blended or divided, and warmer scores (Peng 2023; the official code's ramp, see below)
        llama3        kept, blended or divided by other rules, scores as they were (Llama 3.1's code; original_length 8192)
    length            tokens in the present sequence; only `dynamic` looks at it
    attention_factor  given, it wins over the formula
    Returns ((head_size / 2,) float32 in radians per token, float). Computed in float64 on the CPU; no state is kept.
    ValueError for an odd head size, an unknown scaling, a factor below 1, or a scaling that lacks its original_length.
    """
    if head_size % 2:
        raise ValueError(f'RoPE turns pairs: the head size must be even, not {head_size}')
    if scaling not in ROPE_SCALINGS:
        raise ValueError(f'rope_scaling must be one of {", ".join(ROPE_SCALINGS)}, not {scaling!r}')
    if factor < 1:
        raise ValueError(f'rope_factor must be at least 1, not {factor}')
    if scaling in ('ntk', 'dynamic') and head_size == 2:
        raise ValueError(f'rope_scaling {scaling} needs a head size above 2')
    if scaling in ('dynamic', 'yarn', 'llama3') and not original_length:
        raise ValueError(f'rope_scaling {scaling} needs the original length that the model was trained at')

    if scaling == 'ntk':
        base = base * factor ** (head_size / (head_size - 2))
    elif scaling == 'dynamic':
        stretch = factor * max(length or 0, original_length) / original_length - (factor - 1)       # 1 up to original_length
        base = base * stretch ** (head_size / (head_size - 2))

    theta = wave_frequencies(head_size, base)                                           # (hs / 2,), fast waves first
    if scaling == 'linear':
        theta = theta / factor

    elif scaling == 'yarn':
        # Within the original length pair i turns original_length * theta_i / (2 pi) times. Three bands of pairs:
        #     kept      turns > beta_fast   they tell near tokens apart, and have seen every angle in training
        #     blended   in between          a straight ramp over the pair index
        #     divided   turns < beta_slow   not even one turn in training: stretched, so as to meet no new angle
        # A class that goes round in tutorials raises the base as `ntk` does and divides positions as `linear` does, both at once, without
        # bands: that slows the fast waves, which must stay, by factor, and the slow ones by factor^2. It is not YaRN.
        def pair_that_turns(times):
            """The pair index, as a real number, of the wave that turns so many times within the original length."""
            return head_size * math.log(original_length / (2 * math.pi * times)) / (2 * math.log(base))
        low = max(math.floor(pair_that_turns(beta_fast)), 0)
        high = max(min(math.ceil(pair_that_turns(beta_slow)), head_size - 1), low)     # never below low, which would turn the ramp round
        if high == low:
            high += 0.001                                                               # no division by zero
        pair = torch.arange(head_size // 2, dtype=torch.float64, device='cpu')
        ramp = ((pair - low) / (high - low)).clamp(0, 1)                                # 0 kept .. 1 divided
        theta = theta * (1 - ramp) + theta / factor * ramp
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1                               # sqrt(1/t): scores grow by its square

    elif scaling == 'llama3':
        turns = original_length * theta / (2 * math.pi)                                 # L / wavelength
        keep = ((turns - 1) / (4 - 1)).clamp(0, 1)                                      # 4 turns and more: kept; 1 and less: divided
        theta = theta * keep + theta / factor * (1 - keep)

    return theta.float(), 1.0 if attention_factor is None else float(attention_factor)


def rotation(positions, frequencies, attention_factor=1.0, layout='half'):
    """
    cos and sin of the angles position * theta_i, laid out for rotate(): (T, head_size) each, float32.

        half            cos_0 cos_1 ..  cos_0 cos_1 ..          interleaved     cos_0  cos_0 cos_1  cos_1 ..
                       -sin_0 -sin_1 .. sin_0 sin_1 ..                         -sin_0  sin_0 -sin_1 sin_1 ..
    """
    angles = positions.float()[:, None] * frequencies.to(positions.device)              # (T, hs / 2)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    if layout == 'half':
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(1)


def rotate(x, cos, sin, layout='half'):
    """
    Turns the pairs (a, b) of x by their angles: (a cos - b sin, b cos + a sin) (Su 2021, equation 34).

    x: (..., head_size), of any dtype, which the result has too; cos and sin: from rotation(), broadcast over x. A pair is

        half            (x_i, x_{i + hs/2})     Hugging Face's Llama, GPT-NeoX
        interleaved     (x_2i, x_{2i+1})        the paper, Meta's Llama

    The two are one permutation of a head's dimensions apart, and training cannot tell them from each other; a checkpoint can.
    """
    if layout == 'half':
        partner = x.roll(x.size(-1) // 2, dims=-1)                      # b a: each number's partner in its place
    else:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos + partner * sin).to(x.dtype)


def alibi_slopes(n_head):
    """
    ALiBi's slope of each head (Press 2022, section 3, and the authors' code for other numbers than powers of two): (n_head,), float32.

    n = 2^a heads: 2^(-8/n), 2^(-16/n), .. 2^-8. Otherwise those of the power of two below, then every second one of the power above.
    """
    closest = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (head + 1) / closest) for head in range(closest)]
    slopes += [2 ** (-8 * (head + 1) / (2 * closest)) for head in range(0, 2 * closest, 2)][:n_head - closest]
    return torch.tensor(slopes, device='cpu')


def t5_bucket(distance, num_buckets=32, max_distance=128, causal=True):
    """
    T5's bucket of a distance = query position - key position, elementwise: whole numbers of any shape in, the same shape out.

    Near distances have a bucket each, further ones share buckets that widen logarithmically up to max_distance, beyond which all are
    one (Raffel 2020, section 2.1; Mesh TensorFlow's code). Causal: keys ahead get bucket 0. Else: they get the upper half of the buckets.
    """
    offset = 0
    if not causal:
        num_buckets //= 2
        offset = (distance < 0) * num_buckets
        distance = distance.abs()
    distance = distance.clamp(min=0)
    exact = num_buckets // 2
    # float64, so that a distance where a bucket begins, such as 32 = 16 * 2, falls on its right side on every device that has it
    real = torch.float32 if distance.device.type == 'mps' else torch.float64
    far = (distance.clamp(min=1).to(real) / exact).log() / math.log(max_distance / exact) * (num_buckets - exact)
    far = (exact + (far + 1e-6).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


# ----------------------------------------------------------------------------------------------------------------------
# Attention

def attend(q, k, v, scale, mask=None, is_causal=False, dropout=0.0, pairs=None, bias=lambda q, pairs: pairs):
    """
    softmax(q k^T * scale + bias) v, in the fastest way. q: (B, nh, Tq, hs); k, v: (B, nh, Tk, hs); returns (B, nh, Tq, hs).

    That is PyTorch's fused kernel. Without a bias, `is_causal` spares the kernel the upper triangle where Tq = Tk; where fewer queries
    stand at the end of more keys it would align them to the first keys, so then it is given the mask. A bias is bias(q, pairs), door 3
    of one layer, and holds the mask already.

    On a CPU the kernel does not know a triangle in a bias, and cannot give a bias its gradient. So there we go in blocks of 128 queries,
    each with the keys up to its last one, and where a gradient is called for, by the lines written out below.
    """
    Tq, Tk = q.size(-2), k.size(-2)
    fused = F.scaled_dot_product_attention
    if pairs is None and is_causal and 1 < Tq < Tk:
        pairs = mask.expand(1, 1, Tq, Tk)
    if pairs is None:
        return fused(q, k, v, scale=scale, dropout_p=dropout, is_causal=is_causal and Tq == Tk)
    if q.device.type != 'cpu':
        return fused(q, k, v, attn_mask=bias(q, pairs).to(q.dtype), scale=scale, dropout_p=dropout)

    outputs, end = [], Tk - Tq if is_causal else Tk
    for queries, part in zip(q.split(128, dim=2), pairs.split(128, dim=2)):
        end += queries.size(2) if is_causal else 0                      # the block's last query sees this many keys
        keys, values, rows = k[:, :, :end], v[:, :, :end], bias(queries, part[..., :end])
        if rows.requires_grad:
            y = attend_written_out(queries, keys, values, scale, rows, dropout)
        else:
            rows = rows.to(q.dtype) if q.dtype == torch.float64 else rows       # float32 beside bfloat16 queries is fine
            y = fused(queries, keys, values, attn_mask=rows, scale=scale, dropout_p=dropout)
        outputs.append(y)
    return torch.cat(outputs, dim=2)


def attend_written_out(q, k, v, scale, bias, dropout=0.0, values=None):
    """
    The same in five lines, for reading and for what no kernel does: values(weights) is added to the output (Shaw's a^V). bias is what is
    added to the scores: (1 or B, 1 or nh, Tq, Tk), with the mask in it, or the mask alone, (Tq, Tk).
    """
    scores = (q.float() * scale) @ k.float().transpose(-2, -1)          # (B, nh, Tq, Tk)
    scores += bias
    weights = F.dropout(scores.softmax(dim=-1), dropout).to(v.dtype)
    y = weights @ v                                                     # (B, nh, Tq, hs)
    extra = values(weights) if values else None
    return y if extra is None else y + extra


class CausalSelfAttention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)     # queries, keys, values of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = dropout_layer(config)
        self.n_head, self.dropout, self.causal, self.layer = config.n_head, config.dropout, config.causal, layer
        self.written_out = not config.flash or config.shaw_values

    def forward(self, x, position, shared, mask, cache=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(2) # (B, T, nh, hs) each
        angles, pairs = shared                                                          # from position.prepare
        q, k = position.turn(q, angles), position.turn(k, angles)                       # door 2
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # (B, nh, T, hs) each
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)                                       # (B, nh, Tk, hs) each
        dropout = self.dropout if self.training else 0.0
        with torch.autocast(x.device.type, enabled=False):                              # which would round scores and biases
            bias = functools.partial(position.bias, layer=self.layer)                   # door 3
            if self.written_out:
                y = attend_written_out(q, k, v, position.score_scale, mask if pairs is None else bias(q, pairs), dropout,
                                       values=lambda weights: position.values(weights, pairs, self.layer))
            else:
                y = attend(q, k, v, position.score_scale, mask, self.causal, dropout, pairs, bias)
        y = y.transpose(1, 2).reshape(B, T, C)                                          # heads side by side again
        return self.resid_dropout(self.c_proj(y))


class Cache:
    """
    The keys and values of the tokens read so far, so that reading one more token costs one token. It has no length limit: its memory
    doubles when full. For use without gradients. model.make_cache() makes one, model(idx, cache=cache) reads idx into it.
    """

    def __init__(self, n_layer, batch_size):
        self.batch_size = batch_size
        self.memory = [None] * n_layer          # per layer two tensors (B, nh, capacity, hs): keys, and values
        self.tokens = []                        # the idx read so far, as they came: (B, T) each
        self.length = 0                         # tokens read so far

    def clear(self):
        self.tokens, self.length = [], 0

    def read(self, idx):
        """Called once a forward pass, after all layers have extended: notes the tokens that have been read."""
        self.tokens.append(idx)
        self.length += idx.size(1)

    def extend(self, layer, k, v):
        """Puts k and v, (B, nh, T, hs), behind what the layer holds; returns all its keys and values, (B, nh, length + T, hs) each."""
        start, end = self.length, self.length + k.size(2)
        if self.memory[layer] is None or self.memory[layer][0].size(2) < end:
            grown = [k.new_empty(*k.shape[:2], max(64, 2 * end), k.size(3)) for _ in range(2)]
            for new, old in zip(grown, self.memory[layer] or ()):
                new[:, :, :start] = old[:, :, :start]
            self.memory[layer] = grown
        keys, values = self.memory[layer]
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        return keys[:, :, :end], values[:, :, :end]


# ----------------------------------------------------------------------------------------------------------------------
# GPT-2

def dropout_layer(config):
    return nn.Dropout(config.dropout) if config.dropout > 0 else nn.Identity()         # which spares a small model some time


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate='tanh' if config.gelu == 'tanh' else 'none')
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = dropout_layer(config)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, position, shared, mask, cache=None):
        x = x + self.attn(self.ln_1(x), position, shared, mask, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=SCHEMES[config.position](config),       # the scheme stands where GPT-2 has its position embedding
            drop=dropout_layer(config),
            h=nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight       # weight tying (Press and Wolf 2017)
        self.init_weights()

    def init_weights(self):
        """GPT-2's: N(0, 0.02), the projections onto the residual stream smaller by sqrt(their number), biases 0."""
        for name, parameter in self.named_parameters():
            if name.startswith('transformer.wpe.'):
                continue
            if parameter.dim() >= 2:
                shrink = math.sqrt(2 * self.config.n_layer) if name.endswith('c_proj.weight') else 1
                nn.init.normal_(parameter, mean=0.0, std=0.02 / shrink)
            elif name.endswith('.bias'):
                nn.init.zeros_(parameter)
        # The scheme's own tables last: the same seed gives all schemes the same values for everything that they share.
        for parameter in self.transformer.wpe.parameters():
            nn.init.normal_(parameter, mean=0.0, std=0.02)

    def get_num_params(self, non_embedding=True):
        """Number of parameters; by default without position tables. wte is also the output layer, so it counts."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total - self.get_num_position_params() if non_embedding else total

    def get_num_position_params(self):
        """Number of parameters of the position scheme's own."""
        return sum(parameter.numel() for parameter in self.transformer.wpe.parameters())

    def forward(self, idx, targets=None, cache=None):
        """
        idx, targets: (B, T) token ids; a target of -1 is left out of the loss. With a cache, idx follows the tokens that it has read.
        Returns (logits, loss): (B, T, vocab_size) and the mean cross-entropy in nats per token, or without targets
        (B, 1, vocab_size), the last position's, and None.
        """
        T = idx.size(1)
        position = self.transformer.wpe
        if cache is not None and len(idx) != cache.batch_size:
            raise ValueError(f'the cache was made for a batch of {cache.batch_size}, not {len(idx)}')
        read = idx                                      # what this pass reads: idx, in all cases but one
        if cache is not None and cache.length > 0 and cache.length + T > position.recomputes_from:
            read = torch.cat([*cache.tokens, idx], dim=1)
            cache.clear()
        past = 0 if cache is None else cache.length
        keys = torch.arange(past + read.size(1), device=idx.device)                     # absolute positions
        queries = keys[past:]

        if self.config.causal:                          # (Tq, Tk): 0 where a query may look, -inf at the keys after it
            mask = torch.full((len(queries), len(keys)), -math.inf, device=idx.device).triu_(past + 1)
        else:
            mask = torch.zeros(len(queries), len(keys), device=idx.device)

        with torch.autocast(idx.device.type, enabled=False):                            # positions stay float32
            shared = position.prepare(queries, keys, mask)
            embedding = position.embedding(queries)                                     # door 1
        x = self.transformer.wte(read)                                                  # (B, T, C)
        if embedding is not None:
            x = x + embedding.to(x.dtype)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x, position, shared, mask, cache)
        if cache is not None:
            cache.read(read)
        x = self.transformer.ln_f(x[:, -T:])

        if targets is None:
            return self.lm_head(x[:, -1:]), None         # in generation only the last position counts
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    # ------------------------------------------------------------------------------------------------------------------
    # training

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type, optimizer='adamw', muon_learning_rate=0.02):
        """
        The optimizers of a training run, in a list. 'adamw': one, which decays what has two dimensions or more, as nanoGPT does.
        'muon' (Jordan 2024): a second one takes the blocks' matrices c_attn, c_proj and c_fc, and orthogonalises their steps; embeddings,
        norms and everything about positions stay with AdamW, the same for all schemes.
        """
        matrices, decayed, others = [], [], []
        for name, parameter in self.named_parameters():
            in_block = name.startswith('transformer.h.') and parameter.dim() == 2
            group = matrices if in_block and optimizer == 'muon' else decayed if parameter.dim() >= 2 else others
            group.append(parameter)
        groups = [dict(params=decayed, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]
        fused = 'fused' in inspect.signature(torch.optim.AdamW).parameters and device_type in ('cpu', 'cuda')
        optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **(dict(fused=True) if fused else {}))]
        if matrices:
            muon = torch.optim.Muon if device_type == 'cuda' else Float32Muon
            optimizers.append(muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay))
        return optimizers

    def estimate_mfu(self, fwdbwd_per_iter, dt, dtype='bfloat16'):
        """
        Model FLOPs utilisation: the share of the device's peak in half precision that the model's own arithmetic uses (PaLM paper,
        appendix B). fwdbwd_per_iter: sequences per step; dt: seconds per step. None where the peak is unknown.
        """
        device = self.lm_head.weight.device
        if device.type != 'cuda' or dtype not in ('bfloat16', 'float16'):
            return None
        name = torch.cuda.get_device_name(device)
        peaks = {'H200': 989e12, 'H100 80GB': 989e12, 'H100 PCIe': 756e12, 'A100': 312e12, 'L4': 121e12, 'A10G': 70e12}    # dense
        peak = next((peak for key, peak in peaks.items() if key in name), None)
        if peak is None:
            return None
        config = self.config
        flops_per_token = 6 * self.get_num_params() + 12 * config.n_layer * config.n_embd * config.block_size
        return flops_per_token * config.block_size * fwdbwd_per_iter / dt / peak

    # ------------------------------------------------------------------------------------------------------------------
    # generation

    def make_cache(self, batch_size):
        """An empty cache for `batch_size` sequences: see class Cache. ValueError for a model that is not causal."""
        if not self.config.causal:
            raise ValueError('without a causal mask every new token changes the states of all before it, so there is nothing to cache')
        return Cache(self.config.n_layer, batch_size)

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, context=None, generator=None):
        """
        Yields max_new_tokens new tokens after idx, (B, T): (B, 1) each, as they are made. Call model.eval() before.

        temperature   0 takes the most likely token; below 1 sharpens, above 1 flattens
        top_k, top_p  sample only from the k likeliest tokens, or from the fewest that hold the probability p
        context       the window, in tokens; None: block_size
        generator     a torch.Generator of its own, so that the same seed gives the same text

        What is computed when the text outgrows the window: the model reads afresh, from position 0, the last context // 2 tokens, and
        goes on from there, until they have grown to `context` tokens again. So each token is predicted from context // 2 to `context`
        tokens, exactly as if nothing had ever stood before them, at the cost of reading every token about twice. (Merely dropping
        the oldest keys from the cache would be cheaper and something else: the states kept have seen the dropped tokens.)
        """
        context = context or self.config.block_size
        cache, unread = self.make_cache(len(idx)), idx[:, -context:]
        recent = [unread]                               # the tokens in the window and a few before, for reading afresh
        for _ in range(max_new_tokens):
            if cache.length + unread.size(1) > context:
                recent = [torch.cat(recent, dim=1)[:, -max(context // 2, 1):]]
                cache.clear()
                unread = recent[0]
            logits = self(unread, cache=cache)[0][:, -1].float()
            unread = choose(logits, temperature, top_k, top_p, generator)
            recent.append(unread)
            yield unread

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, context=None, generator=None):
        """idx, (B, T), with max_new_tokens more tokens behind: (B, T + max_new_tokens). See stream()."""
        return torch.cat([idx, *self.stream(idx, max_new_tokens, temperature, top_k, top_p, context, generator)], dim=1)


class Float32Muon(torch.optim.Muon):
    """
    torch's Muon for CPUs. torch orthogonalises each matrix by itself and in bfloat16, which most CPUs only emulate: a step of the
    small default model then takes ten times as long. This does the same in float32, with matrices of one shape side by side.
    """

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameters = [parameter for parameter in group['params'] if parameter.grad is not None]
            for shape in dict.fromkeys(parameter.shape for parameter in parameters):
                alike = [parameter for parameter in parameters if parameter.shape == shape]
                updates = []
                for parameter in alike:
                    momentum = self.state[parameter].setdefault('momentum_buffer', torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group['momentum'])
                    updates.append(parameter.grad.lerp(momentum, group['momentum']))                # Nesterov's look ahead
                rate = group['lr'] * math.sqrt(max(1, shape[0] / shape[1]))
                for parameter, update in zip(alike, orthogonalise(torch.stack(updates), group['ns_steps'])):
                    parameter.mul_(1 - group['lr'] * group['weight_decay']).sub_(update, alpha=rate)


def orthogonalise(matrices, steps=5):
    """
    Each matrix with its singular values brought near 1: (n, rows, columns) to the same. Newton-Schulz, coefficients of Jordan 2024:
    every step takes x to (a + b g + c g^2) x, g = x x^T, a polynomial that pushes singular values of 0..1 towards 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)            # singular values of at most 1
    gram = x @ x.transpose(1, 2)                                        # (n, rows, rows), rows being the fewer now
    identity = torch.eye(gram.size(1), device=gram.device)
    total = identity                            # all polynomials are in one g, so they commute: multiply them up, and x at the end
    for _ in range(steps):
        polynomial = a * identity + b * gram + c * gram @ gram
        total = polynomial @ total
        gram = polynomial @ gram @ polynomial                           # x x^T of the new x
    x = total @ x
    return x.transpose(1, 2) if tall else x


def choose(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token id per row of logits, (B, vocab_size): (B, 1). See GPT.stream for the options."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        smallest = logits.topk(top_k).values[:, [-1]]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True, dim=-1)
        likelier = ordered.softmax(dim=-1).cumsum(dim=-1)[:, :-1]       # the probability of all before the second, the third, ..
        ordered[:, 1:].masked_fill_(likelier >= top_p, -math.inf)       # the likeliest itself always stays
        logits = torch.full_like(logits, -math.inf).scatter(-1, order, ordered)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)
