"""
What the notebooks share: one training loop, what it is given to learn, and the look of their pictures. Importing
it puts the repository's root on the path, so that `from model import GPT` works in a cell.
"""
import io
import os
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython import get_ipython
from matplotlib.figure import Figure
from PIL import Image
from torch.nn import functional as F

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from data.word_order import sentences
from dataset import Dataset, WordTokenizer, prepare_if_missing
from model import GPT, GPTConfig
from optim import make_optimizers
from plots import label_ends


def picture(figure):
    """PNG of a figure, 160 dots to the inch, shown at half the size; 256 colours, for a third of the bytes."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format='png', dpi=160, bbox_inches='tight')
    image = Image.open(full).convert('RGB').quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(small, format='png', optimize=True)
    return small.getvalue(), dict(width=image.width // 2, height=image.height // 2)


if get_ipython():                               # in a notebook
    get_ipython().run_line_magic('matplotlib', 'inline')
    get_ipython().display_formatter.formatters['image/png'].for_type(Figure, picture)
torch.set_num_threads(1)                        # the models here are tiny: more threads do not help
plt.rcParams.update({'figure.dpi': 80, 'font.size': 9, 'figure.constrained_layout.use': True,
                     'axes.spines.top': False, 'axes.spines.right': False})
DIVERGING = 'PuOr_r'                            # for what has a sign: orange above 0, white at 0, purple below

english = WordTokenizer(sentences.VOCABULARY)


def make(position, seed=0, **options):
    """An untrained GPT. The same seed gives all of a size the same weights wherever they share a parameter."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(position=position, bias=False, **options))


def train(gpt, loss, steps, learning_rate, optimizer='muon', look=None, every=25):
    """
    Trains gpt: `steps` steps down loss(), the mean loss of a fresh batch, at a learning rate that
    falls to 0 in the last third. Returns what look() says at the start and every so many steps.
    """
    optimizers = make_optimizers(gpt, 0.1, learning_rate, (0.9, 0.99), 'cpu', optimizer)
    factor = lambda step: min(1, 3 * (1 - step / steps))
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    seen = [look()] if look else []
    for step in range(1, steps + 1):
        loss().backward()
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if look and step % every == 0:
            seen.append(look())
    return seen


# ------------------------------------------------------------------------------------------------------------
# `svo : cat eats fish . who eats ? cat`: questions that only the order of the words answers

def encode(lines):
    """Lines of one length as token ids, (N, T)."""
    return torch.stack([torch.from_numpy(english.encode(line).astype(int)) for line in lines])


# No line of the test has the same words as a line of the training. 11 tokens each, the line break included.
train_lines, test_lines = map(encode, sentences.training_and_validation_lines(5000, 1000, most_clauses=1, seed=1))
prompts, answers = train_lines[:, :9], train_lines[:, 9]
test_prompts, test_answers = test_lines[:, :9], test_lines[:, 9]


@torch.no_grad()
def accuracy(gpt):
    """Share of the 1,000 test questions that are answered correctly."""
    return (gpt(test_prompts)[0][:, 0].argmax(-1) == test_answers).float().mean().item()


def learn_to_answer(position, seed=0, steps=300, batch=64, n_layer=2, **options):
    """A GPT trained to answer, and its accuracy every 25 steps. One seed gives all schemes the same batches."""
    gpt = make(position, seed, n_layer=n_layer, block_size=9, vocab_size=english.vocab_size, n_head=4, n_embd=64,
               **options)
    batches = torch.Generator().manual_seed(seed)

    def loss():
        pick = torch.randint(len(prompts), (batch,), generator=batches)
        return F.cross_entropy(gpt(prompts[pick])[0][:, 0], answers[pick])      # the last place's prediction
    return gpt, train(gpt, loss, steps, learning_rate=0.02, look=lambda: accuracy(gpt))


# ------------------------------------------------------------------------------------------------------------
# running text: sentences of data/word_order, of 11 to 19 tokens

def open_word_order():
    return Dataset(prepare_if_missing('word_order'))


def pieces(tokens, starts, length):
    """The tokens from each of `starts`, an array, to `length` further: (len(starts), length + 1)."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))


def train_on_text(gpt, tokens, steps, length, batch, learning_rate, seed=1):
    """AdamW on random pieces of a text; one seed gives all models the same ones. Returns gpt, for use."""
    batches = torch.Generator().manual_seed(seed)

    def loss():
        starts = torch.randint(len(tokens) - length, (batch,), generator=batches).numpy()
        text = pieces(tokens, starts, length)
        return gpt(text[:, :-1], text[:, 1:])[1]
    train(gpt, loss, steps, learning_rate, 'adamw')
    return gpt.eval()


# ------------------------------------------------------------------------------------------------------------
# pictures

def draw_seeds(axis, x, curves, **style):
    """A curve for each seed, thin, and their mean, thick. Returns where the mean ends."""
    thin = {**style, 'marker': None, 'linestyle': '-'}
    for curve in curves:
        axis.plot(x, curve, **thin, linewidth=0.7, alpha=0.6)
    mean = np.mean(curves, axis=0)
    axis.plot(x, mean, **{'linewidth': 2, 'markersize': 4.5, **style})
    return x[-1], mean[-1]


def draw_signed(axis, values, limit=None, **options):
    """A picture of values above and below 0, which is white: what is nan is grey. Returns it, for a colour bar."""
    limit = limit or np.nanmax(np.abs(np.asarray(values)))
    axis.set_facecolor('0.8')
    return axis.imshow(values, vmin=-limit, vmax=limit, cmap=DIVERGING, **options)
