"""What the tests share: the repository's root on the path, one thread, small models, and the reference numbers."""
import json
import os
import sys

import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
torch.set_num_threads(1)       # these models are so small that a second thread costs more than it saves

from model import GPT, GPTConfig

# Every scheme, and the options that change what it computes: name -> settings. Sizes such as 3 heads of 8 are chosen to differ from one
# another, so that two axes that are swapped cannot go unnoticed.
SCHEMES = {
    'none': dict(position='none'),
    'learned': dict(position='learned'),
    'sinusoidal': dict(position='sinusoidal'),
    'shaw': dict(position='shaw', shaw_max_distance=5),
    'shaw_values': dict(position='shaw', shaw_max_distance=5, shaw_values=True),
    'rope': dict(position='rope'),
    'rope_interleaved': dict(position='rope', rope_layout='interleaved'),
    'alibi': dict(position='alibi'),
    't5': dict(position='t5', t5_buckets=8, t5_max_distance=20),
    'tupe': dict(position='tupe'),
}
SCALINGS = {scaling: dict(position='rope', rope_scaling=scaling, rope_factor=4.0, rope_original_length=16)
            for scaling in ('linear', 'ntk', 'dynamic', 'yarn', 'llama3')}
SIZES = dict(block_size=32, vocab_size=17, n_layer=2, n_head=3, n_embd=24)


@pytest.fixture(autouse=True)
def same_random_numbers_every_time():
    torch.manual_seed(0)


def small_model(name='none', seed=1, std=None, **options):
    """
    A small GPT in evaluation mode: the scheme or scaling `name`, with the sizes above, some of them changed.

    std     None: weights as at initialisation; else all weights are N(0, std): 0.2 spreads scores and logits as training does
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**SIZES, **{**SCHEMES, **SCALINGS}[name], **options})).eval()
    if std is not None:
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=std)
    return model


def random_tokens(*shape, seed=2, vocab_size=SIZES['vocab_size']):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def all_logits(model, idx, **options):
    """The logits at every position, (B, T, vocab_size)."""
    return model(idx, idx, **options)[0]


def reference_values():
    """Numbers that this code did not compute: see `origin` in the file."""
    with open(os.path.join(HERE, 'reference_values.json'), encoding='utf-8') as file:
        return json.load(file)
