"""
A GPT in one file, and eight ways to tell it the order of its tokens.

Attention by itself sees a set: shuffle the tokens and the outputs are shuffled along, nothing else changes.
Order has to be let in, and there are three doors for it. Each scheme uses one, and its class shows how:

    door 1, embeddings        a vector per position, added to the tokens' once             learned, sinusoidal
    door 2, queries and keys  turned by an angle that grows with position, in each layer   rope
    door 3, scores            a bias is added before the softmax, in each layer            shaw t5 alibi tupe

The rest is GPT-2 as nanoGPT has it, with the same parameter names, so that its checkpoints load.

Shapes: B batch, T tokens (Tq as queries, Tk as keys), C = n_embd, nh = n_head, hs = C / nh: a head's size.
"""
import functools
import inspect
import math
import numbers
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.nn import functional as F

from optim import make_optimizers
from rope_scaling import ROPE_SCALINGS, dynamic_factor, ntk, rescale


def need(condition, sentence):
    if not condition:
        raise ValueError(sentence)


class GPTConfig(SimpleNamespace):
    """
    Everything that defines a model: these settings, and the options at the top of the schemes' classes.
    ValueError, with one sentence, for values that make no model; TypeError for a name that is no setting.
    """
    block_size: int = 1024              # longest training sequence, in tokens
    vocab_size: int = 50304             # GPT-2's 50257, padded to a multiple of 64 for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True                   # biases in Linear and LayerNorm, as in GPT-2
    gelu: str = 'exact'                 # or 'tanh', the approximation in OpenAI's and Hugging Face's GPT-2
    causal: bool = True                 # a token sees itself and what came before; False: all, as in BERT
    flash: bool = True                  # fused attention; False: the lines written out
    position: str = 'learned'           # a name in SCHEMES

    def __init__(self, **settings):
        declared = self.declared()
        for name in settings.keys() - declared.keys():
            raise TypeError(f'a GPT has no setting {name!r}')
        super().__init__(**{name: settings.get(name, default) for name, (_, default) in declared.items()})
        for name, (kind, default) in declared.items():
            value = getattr(self, name)
            if value is None and default is None:
                continue
            accepted = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)     # NumPy's, too
            need(isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)),
                 f'{name} must be of type {kind.__name__}, not {value!r}')
            may_be_0 = name in ('dropout', 'sinusoidal_scale')
            need(kind in (bool, str) or 0 < value < 1e300 or value == 0 and may_be_0,
                 f'{name} must be positive, not {value}')
            vars(self)[name] = kind(value)
        need(self.dropout < 1, f'dropout must be in [0, 1), not {self.dropout}')
        need(self.gelu in ('exact', 'tanh'), f'gelu must be one of exact, tanh, not {self.gelu!r}')
        need(self.n_embd % self.n_head == 0, f'n_embd {self.n_embd} is no multiple of n_head {self.n_head}')
        need(self.position in SCHEMES, f'position must be one of {", ".join(SCHEMES)}, not {self.position!r}')
        need(self.rope_scaling == 'none' or issubclass(SCHEMES[self.position], RoPE),
             f'rope_scaling extends RoPE only: it cannot be used with position {self.position!r}')
        with torch.device('meta'):      # allocates nothing: a scheme checks its options when it is made
            SCHEMES[self.position](self)

    def __setattr__(self, name, value):
        raise AttributeError('a model does not follow a change of the config it was built from: make another')

    @staticmethod
    def declared():
        """{name: (type, default)} of all settings: these, then each scheme's options."""
        return {name: (kind, getattr(owner, name)) for owner in (GPTConfig, *SCHEMES.values())
                for name, kind in inspect.get_annotations(owner).items()}


# ------------------------------------------------------------------------------------------------------------
# The position schemes. The first class is position='none' and the interface: doors that are shut.

class Position(nn.Module):
    """
    No positions at all ("NoPE"). With a causal mask two layers still learn order, from what each token can
    see (Kazemnejad 2023).

    Doors are told absolute positions, (Tq,) of the queries and (Tk,) of the keys, so that training, a cache
    that has read Tk - Tq tokens before, and lengths beyond the trained one are the same code. Which keys a
    query may see is attention's business. The annotated attributes of a scheme's class are its options.
    """
    longest = math.inf          # the most tokens that can be read
    cacheable = True            # False: a longer text changes what earlier tokens get: nothing can be kept
    by_content = False          # whether scores() is to be asked
    needs_weights = False       # whether values() is

    def __init__(self, config):
        super().__init__()
        self.causal, self.n_embd, self.n_head = config.causal, config.n_embd, config.n_head
        self.head_size = config.n_embd // config.n_head
        self.score_scale = 1 / math.sqrt(self.head_size)
        self.exact = {}                             # what keep() has been given
        for scheme in type(self).mro():
            for option in inspect.get_annotations(scheme) if issubclass(scheme, Position) else ():
                setattr(self, option, getattr(config, option))

    def embedding(self, queries):               # door 1, once: added to the token embeddings, (Tq, C)
        return None

    def angles(self, queries, keys):            # door 2, once: whatever turn() needs
        return None

    def turn(self, q, k, angles, layer):        # door 2, in each layer: queries and new keys, (B, Tq, nh, hs)
        return q, k

    def bias(self, queries, keys):              # door 3, once: added to all scores, (1, 1 or nh, Tq, Tk)
        return None

    def consecutive_bias(self, queries, keys):  # the same, perhaps faster, where positions are 0, 1, 2, ..
        return self.bias(queries, keys)

    def scores(self, q, k, distance, layer):    # door 3, in each layer: a new tensor, (B, nh, Tq, Tk), from
        return None                             # q: (B, nh, Tq, hs), k: (B, nh, Tk, hs), and i - j: (Tq, Tk)

    def values(self, weights, distance, layer): # behind door 3: added to the output, (B, nh, Tq, hs), from
        return None                             # the weights after softmax: (B, nh, Tq, Tk)

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=0.0, std=0.02)

    def keep(self, name, table):
        """
        Keeps a fixed table, computed in float64 on the CPU, as the float32 attribute `name`. Not as a buffer:
        model.to(bfloat16) would round that, and a frequency of 8 bits is another frequency.
        """
        self.exact[name] = table
        setattr(self, name, fitted(table, torch.get_default_device(), torch.float32))

    def _apply(self, fn, recurse=True):             # what .to(), .cuda(), .bfloat16() and their like call
        super()._apply(fn, recurse)
        for name, table in self.exact.items():      # tables move along; only a float64 model changes them
            like = fn(getattr(self, name))
            setattr(self, name, fitted(table, like.device, torch.promote_types(like.dtype, torch.float32)))
        return self


class Learned(Position):
    """
    One trained vector per position, added to the embedding (Gehring 2017; GPT-2). Each is learned by itself:
    nothing says that 7 comes after 6. And the table has an end.
    """

    def __init__(self, config):
        super().__init__(config)
        self.longest = config.block_size
        self.weight = nn.Parameter(torch.empty(config.block_size, config.n_embd))   # nanoGPT's wpe.weight

    def embedding(self, queries):
        return self.weight[queries]


class Sinusoidal(Position):
    """
    Waves of many lengths, read at the token's position and added to its embedding (Vaswani 2017, 3.5):

        x + scale * (sin(p w_0), cos(p w_0), sin(p w_1), cos(p w_1), ..),   w_i = base^(-2i/C)

    Why waves? A number p by itself grows without end. Fast waves tell neighbours apart and slow ones far
    places, like the digits of a number, all within -1 .. 1. Why sin and cos? A pair is a clock hand: k tokens
    on it has turned by k w_i, wherever it stood; a sine alone cannot tell rising from falling. Why the scale?
    GPT-2's token embeddings have std 0.02, the waves an RMS of 0.707: unscaled they drown the tokens 35 to 1.
    The paper multiplies the embeddings by sqrt(C) instead, which gives the same ratio.

    >>> sinusoidal_table(torch.arange(2), n_embd=4)             # sin and cos of p, then of p / 100
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    sinusoidal_base: float = 10000.0    # wavelengths run from 2 pi to nearly 2 pi base
    sinusoidal_scale: float = 0.02      # the waves are multiplied by this before they are added

    def __init__(self, config):
        super().__init__(config)
        self.keep('frequencies', wave_frequencies(self.n_embd, self.sinusoidal_base))

    def embedding(self, queries):
        return waves(queries, self.frequencies) * self.sinusoidal_scale


class RoPE(Position):
    """
    Rotary positions (Su 2021): pair i of every query and key, (a, b), is turned like a clock hand, by an
    angle x = position * theta_i, to (a cos x - b sin x, b cos x + a sin x); theta_i = base^(-2i/hs). The
    product of two turned pairs depends on the difference of their angles alone, (m - n) theta_i: absolute
    positions go in, relative ones come out. Values stay unturned: what is said does not depend on where. Keys
    are cached after turning, since a key's position never changes. (With rope_scaling='dynamic' its angle
    does: beyond the original length each new token changes theta for all, so nothing can be cached.)

    >>> angle = torch.tensor([math.pi / 2])             # of one pair: a quarter turn takes (1, 0) to (0, 1)
    >>> RoPE.reference(torch.tensor([1., 0.]), angle.cos(), angle.sin()).round().abs()
    tensor([0., 1.])
    """
    rope_base: float = 10000.0          # wavelengths run from 2 pi to nearly 2 pi base
    rope_layout: str = 'half'           # pairs (i, i + hs/2), or 'interleaved': (2i, 2i+1)
    rope_scaling: str = 'none'          # none, linear, ntk, dynamic, yarn or llama3: see rope_scaling.py
    rope_factor: float = 1.0            # length wanted / length trained
    rope_original_length: int = None    # length trained; None: block_size, or that of the run in init_from
    rope_attention_factor: float = None # multiplies cos and sin; None: YaRN's formula for yarn, else 1
    yarn_beta_fast: float = 32.0        # pairs that turn more often within the trained length are kept,
    yarn_beta_slow: float = 1.0         # those that turn less often than this are slowed by the factor

    def __init__(self, config):
        super().__init__(config)
        need(self.rope_layout in ('half', 'interleaved'),
             f'rope_layout must be one of half, interleaved, not {self.rope_layout!r}')
        self.original_length = self.rope_original_length or config.block_size
        frequencies, self.attention_factor = rope_frequencies(
            self.head_size, self.rope_base, self.rope_scaling, self.rope_factor, self.original_length, None,
            self.yarn_beta_fast, self.yarn_beta_slow, self.rope_attention_factor, dtype=torch.float64)
        self.keep('frequencies', frequencies)                                       # (hs / 2,)
        self.cacheable = self.rope_scaling != 'dynamic'

    def angles(self, queries, keys):
        theta = self.frequencies
        if self.rope_scaling == 'dynamic':
            theta = ntk(theta, dynamic_factor(self.rope_factor, self.original_length, len(keys)))
        cos, sin = rotation(queries, theta, self.attention_factor, self.rope_layout)    # (Tq, hs) each
        return cos[:, None], sin[:, None]                                           # to fit (B, Tq, nh, hs)

    def turn(self, q, k, angles, layer):
        return rotate(q, *angles, self.rope_layout), rotate(k, *angles, self.rope_layout)

    @staticmethod
    def reference(x, cos, sin):
        """rotate() by the formula, for the layout 'half', with a cos and a sin for each pair."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Relative(Position):
    """A bias that knows distances alone. A scheme says of_distance(i - j): (..) to (.., nh)."""

    def of_distance(self, distance):
        raise NotImplementedError

    def bias(self, queries, keys):
        return self.of_distance(queries[:, None] - keys).movedim(-1, 0)[None]           # (1, nh, Tq, Tk)

    def consecutive_bias(self, queries, keys):
        # Only Tq + Tk - 1 distances occur. In a row of them, largest first, each query's are a stretch of Tk:
        # the last query's is the first, and the one before it begins a place further on.
        distance = queries[-1] - keys[0] - torch.arange(len(queries) + len(keys) - 1, device=keys.device)
        return self.of_distance(distance).T.contiguous().unfold(-1, len(keys), 1).flip(-2)[None]


class ALiBi(Relative):
    """
    The further, the less: score - m_h |i - j|, with a fixed slope m_h per head and no parameters (Press
    2022). A head with a large slope sees its neighbours alone, one with a small slope nearly everything.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    def __init__(self, config):
        super().__init__(config)
        self.keep('slopes', alibi_slopes(self.n_head).double())

    def of_distance(self, distance):
        return -self.slopes * distance.abs()[..., None]


class T5(Relative):
    """
    A trained bias per head and bucket of distances, shared by all layers: score + table[bucket(i - j), h]
    (Raffel 2020, section 2.1). Half of the buckets hold one distance each; the others ever more, and the last
    all the rest.

    >>> t5_bucket(torch.tensor([0, 1, 15, 16, 18, 19, 40, 112, 113, 5000]))
    tensor([ 0,  1, 15, 16, 16, 17, 23, 30, 31, 31])
    """
    t5_buckets: int = 32                # buckets of distances
    t5_max_distance: int = 128          # distances from here on share the last bucket

    def __init__(self, config):
        super().__init__(config)
        self.keep('begins', t5_begins(self.t5_buckets, self.t5_max_distance, self.causal))
        self.table = nn.Parameter(torch.empty(self.t5_buckets, self.n_head))

    def of_distance(self, distance):
        bucket = t5_bucket(distance, self.t5_buckets, self.t5_max_distance, self.causal, self.begins)
        return F.embedding(bucket, at_least_float32(self.table))


class Shaw(Position):
    """
    A trained vector per distance and layer, shared by the heads (Shaw 2018, equations 3 and 4):

        score_ij = q_i . (k_j + a^K_{j-i}) / sqrt(hs)
        output_i = sum_j weight_ij (v_j + a^V_{j-i})        with shaw_values

    Unlike a bias, q_i . a^K depends on the token: one can ask for its neighbour, another for itself.
    Distances are clipped at k, so that all further ones share a row.

    >>> (torch.arange(3) - torch.arange(3)[:, None]).clamp(-1, 0) + 1   # k = 1: at [i, j] the row of j - i
    tensor([[1, 1, 1],
            [0, 1, 1],
            [0, 0, 1]])
    """
    shaw_max_distance: int = 16         # the paper's k; keys further away than this share a row
    shaw_values: bool = False           # a^V as well: by written-out attention, and the paper finds no gain
    by_content = True

    def __init__(self, config):
        super().__init__(config)
        rows = self.shaw_max_distance * (1 if self.causal else 2) + 1               # j - i = -k..0, or -k..k
        self.a_k = nn.Parameter(torch.empty(config.n_layer, rows, self.head_size))
        self.needs_weights = self.shaw_values
        if self.shaw_values:
            self.a_v = nn.Parameter(torch.empty(config.n_layer, rows, self.head_size))

    def row(self, distance):
        k = self.shaw_max_distance
        return (-distance).clamp(-k, 0 if self.causal else k) + k

    def scores(self, q, k, distance, layer):        # q_i with every row, of which each j then takes its own
        products = at_least_float32(q) @ at_least_float32(self.a_k[layer]).T * self.score_scale
        return products.gather(-1, self.row(distance).expand(*q.shape[:2], -1, -1))

    def reference(self, q, distance, layer):        # scores() by the formula: a vector for every pair
        a = self.a_k[layer][self.row(distance)]                                         # (Tq, Tk, hs)
        return torch.einsum('bhid,ijd->bhij', q, a) * self.score_scale

    def values(self, weights, distance, layer):     # in float32: a row may gather very many small weights
        by_row = torch.zeros(*weights.shape[:3], self.a_v.size(1), device=weights.device)
        by_row = by_row.scatter_add(-1, self.row(distance).expand_as(weights), weights.float())
        return (by_row @ self.a_v[layer].float()).to(weights.dtype)                     # (B, nh, Tq, hs)


class TUPE(Position):
    """
    Untied positions (Ke 2021, equation 7). Positions that are added to embeddings make scores of four parts:
    word-word, word-position, position-word, position-position. TUPE leaves the mixed two out as noise, and
    gives positions queries and keys of their own, the same for every text and layer:

        score_ij = (x_i Wq . x_j Wk + p_i Uq . p_j Uk) / sqrt(2 hs)

    p is the layer-normed sinusoidal table, so that it has no end; the paper's is learned.

    >>> F.layer_norm(sinusoidal_table(torch.arange(2), 4), (4,)).norm(dim=1)        # all p have one length
    tensor([2.0000, 1.9999])
    """

    def __init__(self, config):
        super().__init__(config)
        self.score_scale = 1 / math.sqrt(2 * self.head_size)
        self.keep('frequencies', wave_frequencies(self.n_embd))
        self.u_q = nn.Parameter(torch.empty(self.n_embd, self.n_embd))
        self.u_k = nn.Parameter(torch.empty(self.n_embd, self.n_embd))

    def bias(self, queries, keys):
        p_q, p_k = (F.layer_norm(waves(p, self.frequencies), (self.n_embd,)) for p in (queries, keys))
        u_q, u_k = (at_least_float32(u).view(self.n_head, -1, self.n_embd) for u in (self.u_q, self.u_k))
        q = p_q @ u_q.transpose(1, 2)                                                   # (nh, Tq, hs)
        # A single query, behind a cache, takes the product the other way round: U_k does not meet all keys.
        scores = q @ (u_k @ p_k.T) if len(queries) > 1 else q @ u_k @ p_k.T             # (nh, Tq, Tk)
        return (scores * self.score_scale)[None]


SCHEMES = {'none': Position, 'learned': Learned, 'sinusoidal': Sinusoidal, 'shaw': Shaw, 'rope': RoPE,
           'alibi': ALiBi, 't5': T5, 'tupe': TUPE}


# ------------------------------------------------------------------------------------------------------------
# What the schemes compute, each usable alone

def at_least_float32(x):
    """x in float32, or in float64 if it is in that: what positions and scores are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def fitted(table, device, dtype):
    """A table on a device; of real numbers, in that type."""
    return table.to(device, dtype if table.is_floating_point() else table.dtype)


def wave_frequencies(size, base=10000.0):
    """theta_i = base^(-2i/size), in radians per token: (size / 2,) float64, on the CPU."""
    need(size % 2 == 0, f'sinusoids come in pairs: n_embd must be even, not {size}')
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64, device='cpu') / size)


def waves(positions, frequencies):
    """sin and cos of position * frequency, side by side: (T,) and (n,) to (T, 2n), in frequencies' type."""
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


def sinusoidal_table(positions, n_embd, base=10000.0):
    """
    PE[p, 2i] = sin(p / base^(2i/d)), PE[p, 2i+1] = cos(p / base^(2i/d)), d = n_embd (Vaswani 2017, 3.5).

    positions: (T,), of any kind. Returns (T, n_embd), in float32, or in float64 for float64 positions.
    """
    dtype = torch.float64 if positions.dtype == torch.float64 else torch.float32
    return waves(positions, wave_frequencies(n_embd, base).to(positions.device, dtype))


def rope_frequencies(head_size, base=10000.0, *options, dtype=torch.float32, **named_options):
    """
    RoPE's theta_i = base^(-2i/d), d = head_size (Su 2021, section 3.2.2), (head_size / 2,), computed in
    float64 on the CPU; and what cos and sin are multiplied by, a float. options: rescale()'s, for texts
    longer than trained.

    >>> rope_frequencies(8)[0]
    tensor([1.0000, 0.1000, 0.0100, 0.0010])
    """
    need(head_size % 2 == 0, f'RoPE turns pairs: the head size n_embd / n_head must be even, not {head_size}')
    need(base > 1, f'rope_base must be above 1, not {base}')
    theta, factor = rescale(wave_frequencies(head_size, base), base, *options, **named_options)
    return theta.to(dtype), factor


def rotation(positions, frequencies, attention_factor=1.0, layout='half'):
    """
    cos and sin of the angles position * theta_i, laid out for rotate(): (T, head_size) each.

        half            cos_0 cos_1 ..  cos_0 cos_1 ..          interleaved     cos_0  cos_0 cos_1  cos_1 ..
                       -sin_0 -sin_1 .. sin_0 sin_1 ..                         -sin_0  sin_0 -sin_1 sin_1 ..
    """
    angles = positions.to(frequencies.dtype)[:, None] * frequencies                     # (T, hs / 2)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    if layout == 'half':
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(1)


def rotate(x, cos, sin, layout='half'):
    """
    Turns the pairs (a, b) of x by their angles: (a cos - b sin, b cos + a sin) (Su 2021, equation 34).

    x: (.., head_size), of any dtype, which the result has too; cos and sin: from rotation(). A pair is

        half            (x_i, x_{i + hs/2})     Hugging Face's Llama, GPT-NeoX
        interleaved     (x_2i, x_{2i+1})        the paper, Meta's Llama

    They are one permutation of a head's dimensions apart: training cannot tell one from the other, a
    checkpoint can.
    """
    if layout == 'half':
        partner = x.roll(x.size(-1) // 2, dims=-1)                      # (b, a): each one's partner
    else:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos + partner * sin).to(x.dtype)                        # a cos + b (-sin), b cos + a sin


def alibi_slopes(n_head):
    """
    ALiBi's slope of each head, (n_head,) (Press 2022, section 3, and the authors' code): for n = 2^a heads
    2^(-8/n), 2^(-16/n), .. 2^-8; else those of the power of two below, then every second of that above.
    """
    closest = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (head + 1) / closest) for head in range(closest)]
    slopes += [2 ** (-8 * (head + 1) / (2 * closest)) for head in range(0, 2 * closest, 2)][:n_head - closest]
    return torch.tensor(slopes, device='cpu')


def t5_begins(num_buckets=32, max_distance=128, causal=True):
    """
    The distances at which buckets 1, 2, .. begin. Of 2 e buckets the first e hold one distance each; bucket
    e + m begins where m = e ln(n / e) / ln(max_distance / e), which is at n = e (max_distance / e)^(m / e).

    >>> t5_begins().tolist()[14:]
    [15, 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    """
    parts = 2 if causal else 4
    need(num_buckets % parts == 0, f't5_buckets must be a multiple of {parts}, not {num_buckets}')
    e = num_buckets // parts
    need(max_distance > e, f't5_max_distance must be above {e}, the distances with a bucket of their own, '
         f'not {max_distance}')
    shared = [math.ceil(e * (max_distance / e) ** (m / e) - 1e-6) for m in range(e)]    # 16 * 8^(1/3) is 32
    return torch.tensor([*range(1, e), *shared], device='cpu')


def t5_bucket(distance, num_buckets=32, max_distance=128, causal=True, begins=None):
    """
    T5's bucket of a distance n = i - j, for whole numbers of any shape (Raffel 2020, section 2.1; Mesh
    TensorFlow's code). Causal, keys ahead get bucket 0; else they have a half of the buckets to themselves.
    begins: what t5_begins() says, where it is at hand on the distances' device.
    """
    if begins is None:
        begins = t5_begins(num_buckets, max_distance, causal).to(distance.device)
    if causal:
        return torch.bucketize(distance, begins, right=True)
    return torch.bucketize(distance.abs(), begins, right=True) + (distance < 0) * (num_buckets // 2)


# ------------------------------------------------------------------------------------------------------------
# Attention

def attend_written_out(q, k, v, scale, mask, dropout=0.0, keep=None, values=None):
    """
    softmax(q k^T * scale + mask) v: (B, nh, Tq, hs). q: (B, nh, Tq, hs); k, v: (B, nh, Tk, hs); mask: (..,
    Tq, Tk), all that is added to the scores; keep: a list that takes the weights; values: see Position.
    """
    scores = (at_least_float32(q) * scale) @ at_least_float32(k).transpose(-2, -1)      # (B, nh, Tq, Tk)
    scores += mask
    weights = scores.softmax(dim=-1)
    if keep is not None:
        keep.append(weights)
    weights = F.dropout(weights, dropout).to(v.dtype)
    return weights @ v if values is None else weights @ v + values(weights)


def attend(q, k, v, scale, mask=None, is_causal=False, dropout=0.0):
    """
    The same by PyTorch's fused kernel, which with is_causal knows the triangle by itself. On a CPU it has no
    gradient for what is added to the scores: there the lines above serve.
    """
    if mask is not None and mask.requires_grad and q.device.type == 'cpu':
        return attend_written_out(q, k, v, scale, mask, dropout)
    if mask is not None and (q.device.type != 'cpu' or q.dtype == torch.float64):
        mask = mask.to(q.dtype)                         # beside bfloat16 queries a CPU takes float32
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale)


class CausalSelfAttention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)    # queries, keys, values
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = dropout_layer(config)
        self.config, self.layer = config, layer

    def forward(self, x, position, angles, blocks, cache=None, keep=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).view(B, T, 3, self.config.n_head, -1).unbind(2)        # (B, T, nh, hs) each
        q, k = position.turn(q, k, angles, self.layer)                                  # door 2
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # (B, nh, T, hs) each
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)                                       # (B, nh, Tk, hs) each
        with torch.autocast(x.device.type, enabled=False):                  # which would round the scores
            if len(blocks) == 1:
                y = self.attend(q, k, v, position, *blocks[0][2:], keep)                # (B, nh, T, hs)
            else:
                y = torch.cat([
                    self.attend(q[:, :, rows], k[:, :, :seen], v[:, :, :seen], position, mask, distance, keep)
                    for rows, seen, mask, distance in blocks], dim=2)
        y = y.transpose(1, 2).reshape(B, T, C)                                      # heads side by side again
        return self.resid_dropout(self.c_proj(y))

    def attend(self, q, k, v, position, mask, distance, keep):
        """One of GPT.blocks(): some queries, and the keys and values that they see."""
        dropout, scale = self.config.dropout if self.training else 0.0, position.score_scale
        if position.by_content:
            mask = position.scores(q, k, distance, self.layer).add_(mask)               # door 3
        if self.config.flash and keep is None and not position.needs_weights:
            is_causal = True if mask is None and self.config.causal and q.size(2) > 1 else False  # no SymBool
            return attend(q, k, v, scale, mask, is_causal, dropout)
        values = None
        if position.needs_weights:
            values = functools.partial(position.values, distance=distance, layer=self.layer)
        return attend_written_out(q, k, v, scale, mask, dropout, keep, values)


class Cache:
    """
    The keys and values of the tokens read so far, so that reading one more token costs one token. Its memory
    doubles when full. For use without gradients. model.make_cache() makes one, model(idx, cache=cache) reads
    idx into it.
    """

    def __init__(self, n_layer, batch_size):
        self.batch_size, self.length = batch_size, 0    # tokens read so far: GPT.forward counts them
        self.memory = [()] * n_layer                   # per layer keys and values, (B, nh, capacity, hs) each

    def extend(self, layer, k, v):
        """Puts k and v, (B, nh, T, hs), behind what the layer holds; returns all, (B, nh, length + T, hs)."""
        start, end = self.length, self.length + k.size(2)
        if not self.memory[layer] or self.memory[layer][0].size(2) < end:
            grown = [new.new_empty(*new.shape[:2], max(64, 2 * end), new.size(3)) for new in (k, v)]
            for new, old in zip(grown, self.memory[layer]):
                new[:, :, :start] = old[:, :, :start]
            self.memory[layer] = grown
        for memory, new in zip(self.memory[layer], (k, v)):
            memory[:, :, start:end] = new
        return [memory[:, :, :end] for memory in self.memory[layer]]


# ------------------------------------------------------------------------------------------------------------
# GPT-2

def dropout_layer(config):
    return nn.Dropout(config.dropout) if config.dropout > 0 else nn.Identity()      # which saves some time


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

    def forward(self, x, *shared):
        x = x + self.attn(self.ln_1(x), *shared)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=SCHEMES[config.position](config),   # the scheme stands where GPT-2 has its position embedding
            drop=dropout_layer(config),
            h=nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self):
        """GPT-2's: N(0, 0.02), projections to the residual stream smaller by sqrt(their number), biases 0."""
        self.transformer.wte.weight = self.lm_head.weight       # weight tying (Press and Wolf 2017)
        for name, parameter in self.named_parameters():
            if name.startswith('transformer.wpe.'):
                continue
            if parameter.dim() >= 2:
                shrink = math.sqrt(2 * self.config.n_layer) if name.endswith('c_proj.weight') else 1
                nn.init.normal_(parameter, mean=0.0, std=0.02 / shrink)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith('.bias') else 1.0)    # 1: LayerNorm's
        # The scheme's own last: one seed gives all schemes the same values for everything that they share.
        self.transformer.wpe.init_weights()

    def get_num_params(self, non_embedding=True):
        """Number of parameters; by default without position tables. wte counts: it is the output, too."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total - self.get_num_position_params() if non_embedding else total

    def get_num_position_params(self):
        """Number of parameters of the position scheme's own."""
        return sum(parameter.numel() for parameter in self.transformer.wpe.parameters())

    def forward(self, idx, targets=None, cache=None, positions=None, keep=None):
        """
        idx, targets: (B, T) token ids; a target of -1 is left out of the loss. With a cache, idx follows the
        tokens that it has read. positions: (T,), rising, where they are not 0, 1, 2, .. keep: a list to which
        each layer's attention weights are appended, (B, nh, T, Tk). Returns (logits, loss): (B, T,
        vocab_size) and the mean cross-entropy in nats per token, or without targets (B, 1, vocab_size), the
        last position's, and None.
        """
        T, past, scheme = idx.size(1), 0 if cache is None else cache.length, self.transformer.wpe
        need(past + T <= scheme.longest, f'the {self.config.position} position table ends at '
             f'{scheme.longest} tokens (block_size), so it cannot read more')
        need(cache is None or len(idx) == cache.batch_size,
             f'the cache was made for a batch of {cache and cache.batch_size}, and this is another')
        keys = torch.arange(past + T, device=idx.device) if positions is None else positions
        queries = keys[past:]

        with torch.autocast(idx.device.type, enabled=False):                        # positions stay float32
            embedding = scheme.embedding(queries)                                       # door 1
            angles = scheme.angles(queries, keys)                                       # door 2
            bias_of = scheme.consecutive_bias if positions is None else scheme.bias
            blocks = self.blocks(bias_of(queries, keys), queries, keys, keep)           # door 3
        x = self.transformer.wte(idx)                                                   # (B, T, C)
        if embedding is not None:
            x = x + embedding.to(x.dtype)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x, scheme, angles, blocks, cache, keep)
        if cache is not None:
            cache.length += T
        x = self.transformer.ln_f(x)

        if targets is None:
            return self.lm_head(x[:, -1:]), None         # in generation only the last position counts
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    def blocks(self, bias, queries, keys, keep=None):
        """
        What attention goes through in each layer, [(rows, seen, mask, distance)]: some of the queries, how
        many keys the last of them sees, what is added to their scores, (.., Tq, Tk), and i - j, for scores().
        It is one block with nothing to add where the kernel knows what may be seen; else, on a CPU, 128
        queries at a time, since its kernel does not skip the triangle that nobody sees.
        """
        scheme, Tq, Tk, causal = self.transformer.wpe, len(queries), len(keys), self.config.causal
        by_kernel = self.config.flash and keep is None and (Tq in (1, Tk) or not causal)
        if by_kernel and bias is None and not scheme.by_content:
            return [(slice(None), Tk, None, None)]
        blocks, size = [], 128 if keys.device.type == 'cpu' and keep is None else Tq
        for number in range(-(-Tq // size)):            # what a compiled model is bound to, rather than to Tq
            start, end = number * size, min((number + 1) * size, Tq)
            seen = Tk - Tq + end if causal else Tk
            mask = torch.full((end - start, seen), -math.inf if causal else 0.0, device=keys.device)
            mask = mask.triu_(seen - (end - start) + 1)         # -inf at keys after the query, 0 at others
            if bias is not None:
                mask = mask + bias[:, :, start:end, :seen]      # in this order the sum lies row by row
            distance = queries[start:end, None] - keys[:seen] if scheme.by_content else None
            blocks.append((slice(start, end), seen, mask, distance))
        return blocks

    @torch.no_grad()
    def attention(self, idx):
        """What each token of idx, (B, T), attends to: (n_layer, B, n_head, T, T), in rows that sum to 1."""
        weights = []
        self(idx, keep=weights)
        return torch.stack(weights)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """nanoGPT's: one AdamW. A training run may have two optimizers: see make_optimizers() in optim.py."""
        return make_optimizers(self, weight_decay, learning_rate, betas, device_type)[0]

    def crop_block_size(self, block_size):
        """nanoGPT's: a shorter block_size from here on. A table of positions loses its last rows."""
        need(0 < block_size <= self.config.block_size, f'block_size can only be cropped, not be {block_size}')
        scheme, config = self.transformer.wpe, vars(self.config)
        config.update(block_size=block_size, rope_original_length=getattr(scheme, 'original_length', None))
        if scheme.longest < math.inf:
            scheme.weight, scheme.longest = nn.Parameter(scheme.weight.data[:block_size].clone()), block_size

    def make_cache(self, batch_size):
        """An empty Cache for `batch_size` sequences. ValueError where nothing can be kept."""
        need(self.config.causal and self.transformer.wpe.cacheable,
             'nothing can be cached: not causal, or its positions stretch: a new token changes earlier ones')
        return Cache(self.config.n_layer, batch_size)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, context=None,
               generator=None, vocab_size=None, stop_token=None):
        """
        Yields max_new_tokens new tokens after idx, (B, T): (B, 1) each, as they are made. Call model.eval()
        before. ValueError for an empty idx and options out of range.

        temperature   0 takes the most likely token; below 1 sharpens, above 1 flattens
        top_k, top_p  sample only from the k likeliest tokens, or from the fewest that hold the probability p
        context       the window, in tokens; None: block_size
        generator     a torch.Generator of its own, so that the same seed gives the same text
        vocab_size    the tokenizer's, where the model's is padded: ids from there on are never sampled
        stop_token    an id that ends the text, as its last token; in a batch, when every row has had it

        When the text outgrows the window, the model reads afresh, from position 0, the last context // 2
        tokens: each token is predicted from context // 2 to `context` tokens, as if nothing had stood before.
        (To drop the oldest keys from the cache would be cheaper, but the states kept have seen those tokens.)
        """
        context = self.config.block_size if context is None else context
        need(idx.size(1) > 0, 'there must be a token to begin with')
        need(context >= 1, f'context must be at least 1, or None for block_size, not {context}')
        need(max_new_tokens >= 0, f'max_new_tokens must be at least 0, not {max_new_tokens}')
        cache = self.make_cache(len(idx)) if self.transformer.wpe.cacheable else None
        window, ended = idx[:, -context:], False
        for _ in range(max_new_tokens):
            if window.size(1) > context:
                window = window[:, -max(context // 2, 1):]
                if cache is not None:
                    cache.length = 0
            unread = window if cache is None else window[:, cache.length:]
            with torch.inference_mode():
                logits = self(unread, cache=cache)[0][:, -1, :vocab_size].float()
            token = choose(logits, temperature, top_k, top_p, generator)    # outside: a tensor as any other
            window, ended = torch.cat((window, token), dim=1), ended | (token == stop_token)
            yield token
            if stop_token is not None and ended.all():
                return

    def generate(self, idx, max_new_tokens, *options, **named_options):
        """idx, (B, T), with stream()'s tokens behind it. Of a list of prompts, (T,) each, every one alone."""
        if isinstance(idx, list):
            return [self.generate(one[None], max_new_tokens, *options, **named_options)[0] for one in idx]
        return torch.cat([idx, *self.stream(idx, max_new_tokens, *options, **named_options)], dim=1)


def choose(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token id per row of logits, (B, vocab_size): (B, 1). See GPT.stream for the options."""
    need(temperature >= 0, f'temperature must be at least 0, not {temperature}')
    need(top_k is None or top_k >= 1, f'top_k must be at least 1, or None for all, not {top_k}')
    need(top_p is None or 0 < top_p <= 1, f'top_p must be above 0 and at most 1, or None, not {top_p}')
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        kept, ids = logits.topk(top_k)                                  # k of them, also where some are equal
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, kept)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True, dim=-1)
        likelier = ordered.softmax(dim=-1).cumsum(dim=-1)[:, :-1]       # the sum before the 2nd, the 3rd, ..
        ordered[:, 1:].masked_fill_(likelier >= top_p, -math.inf)       # the likeliest itself always stays
        logits = torch.full_like(logits, -math.inf).scatter(-1, order, ordered)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)
