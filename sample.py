"""
Text from a trained run, streamed as it is made; or the same prompt through several, one under the other.

    python sample.py --out_dir=out/rope --start="To be, or not to be"
    python sample.py out/learned out/rope out/alibi --start=FILE:prompt.txt --temperature=0
    python sample.py out/rope --rope_scaling=yarn --rope_factor=4 --context=512
    python sample.py gpt2 --start="The answer is" --stop="."                # GPT-2, by transformers
"""
import codecs
import glob
import math
import os
import signal

from configurator import configure, count, fail
from streams import Output, open_text

# ------------------------------------------------------------------------------------------------------------
out_dir: str = None             # the run; several can be named without a flag
init_from = 'resume'            # nanoGPT's way to name GPT-2: gpt2, gpt2-medium, .. ('resume': out_dir)
start = '\n'                    # the prompt; 'FILE:prompt.txt' reads it from a file
num_samples: count = 1          # texts per run
max_new_tokens = 500            # tokens per text
stop: str = None                # ends a text where this has been made, such as '\n\n'
temperature = 0.8               # 0: always the likeliest token; below 1 more cautious, above 1 wilder
top_k: count | None = 200       # sample from the k likeliest tokens only; None: from all
top_p: float = None             # sample from the fewest tokens that hold this probability; None: from all
seed = 1337                     # the same seed gives the same text
context: count = None           # the window in tokens, beyond the trained length too; None: block_size
rope_scaling: str = None        # rope runs: none, linear, ntk, dynamic, yarn or llama3; None: as trained
rope_factor: float = None       # rope runs: length wanted / length trained; None: as trained
rope_original_length: count = None      # rope runs: length trained; None: as trained
dataset: str = None             # where a checkpoint carries no vocabulary, as nanoGPT's: its data set
device = 'auto'                 # auto, cpu, cuda, cuda:0, mps
dtype: str = None               # float32, bfloat16 or float16; None: bfloat16 on CUDA, else float32
compile = False                 # torch.compile the model: slow to start
# ------------------------------------------------------------------------------------------------------------
settings, given, runs = configure(globals(), __file__, arguments_are='runs')
runs = runs + ([out_dir] if out_dir else []) + ([init_from] if init_from != 'resume' else [])

stop = stop and stop.replace('\\n', '\n')         # shells hand it on as two characters
if 0 < temperature < 1e-3:
    fail(f'temperature must be 0, for the likeliest token, or at least 0.001, not {temperature}')
if top_p is not None and not 0 < top_p <= 1:
    fail(f'top_p must be above 0, and up to 1, not {top_p}')
if not runs:
    there = ' '.join(sorted(os.path.dirname(path) for path in glob.glob('out/*/ckpt.pt')))
    fail('which run? name one or more, as in: python sample.py ' + (there or 'out/rope (train it first)'))
if start.startswith('FILE:'):
    try:
        with open_text(start[5:], largest=2 ** 24) as file:
            start = file.read()
    except UnicodeDecodeError:
        fail(f'the prompt file {start[5:]!r} is not UTF-8 text; save it as UTF-8, or name another')
    except OSError as error:
        fail(f'the prompt file {start[5:]!r} cannot be read ({error.strerror}); check the path')
if not start:
    fail('the prompt is empty; give --start at least one character')

import torch                    # after configure(), so that --help and mistakes in flags answer at once

from checkpoints import make_model
from dataset import GPT2_VOCABULARY, Dataset, data_folder, make_tokenizer
from machine import autocast, pick_device
from model import Cache
from pretrained import load_start

if dataset:
    data_folder(dataset)        # does it exist?
device = pick_device(device)
forward_context = autocast(device, dtype or ('bfloat16' if device.type == 'cuda' else 'float32'))
torch.set_float32_matmul_precision('high')
changes = {name: settings[name] for name in ('rope_scaling', 'rope_factor', 'rope_original_length')
           if settings[name] is not None}

NAME_THE_DATA = 'name the data set that it was trained on, such as --dataset=tinyshakespeare'


def write(text):
    """Writes a piece of the text at once. One line if it would be lost, as on a full disk."""
    print(text, end='', flush=True)
    if 1 in Output.faults:
        fail(f'the text cannot be written ({Output.faults[1].strerror}); see where the output goes')


def tokenizer_of(checkpoint):
    """A checkpoint carries its run's own tokenizer, so the data folder may be gone; nanoGPT's carry none."""
    if 'tokenizer' in checkpoint:
        return make_tokenizer(checkpoint['tokenizer'])
    if dataset:
        return Dataset(data_folder(dataset)).tokenizer
    if checkpoint['model_args']['vocab_size'] >= GPT2_VOCABULARY:
        return make_tokenizer({'kind': 'gpt2'})
    raise ValueError(f'it carries no vocabulary; {NAME_THE_DATA}')


def load(run):
    """A run's model, tokenizer, the prompt in tokens, (1, T), and what it reached, in words."""
    checkpoint, path = load_start(run)
    model = make_model(checkpoint, path, **changes).to(device).eval()
    longest = model.transformer.wpe.longest
    if context is not None and context > longest:
        fail(f'{path}: its table of positions ends at {longest} tokens; choose a context of at most that, '
             f'not {context}')
    try:
        tokenizer = tokenizer_of(checkpoint)
    except ValueError as error:
        fail(f'{path}: {error}')
    try:
        prompt = torch.from_numpy(tokenizer.encode(start).astype('int64'))
    except ValueError as error:
        if 'start' in given:
            fail(f'{path}: {error}')
        prompt = torch.tensor([0])                      # a text without line breaks: its first token will do
    if not tokenizer.vocab_size <= model.config.vocab_size < tokenizer.vocab_size + 64:     # padded, perhaps
        fail(f'{path}: the tokenizer has {tokenizer.vocab_size} tokens and the model '
             f'{model.config.vocab_size}, so they do not belong together; {NAME_THE_DATA}')
    # Of the evaluations during training the best one, over some windows: not the figure to compare by.
    best, windows = checkpoint.get('best_val_loss'), checkpoint.get('config', {}).get('eval_windows')
    reached = '' if best is None else f', best loss {best:.4f}' + f' on {windows} windows' * bool(windows)
    return model, tokenizer, prompt[None].to(device), reached


loaded = [(run, *load(run)) for run in runs]            # all first: a mistake in the last one shows at once
signal.signal(signal.SIGINT, signal.SIG_DFL)            # Ctrl-C ends the text, without a traceback
if hasattr(signal, 'SIGPIPE'):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # and so does a closed pipe, as in `| head`

if compile:                     # but for the cache, which would be compiled anew at every length
    Cache.extend = torch.compiler.disable(Cache.extend)
    torch._dynamo.config.recompile_limit = 1000         # each layer of each run is compiled for itself

for run, model, tokenizer, prompt, reached in loaded:
    if len(runs) > 1:
        write(f'=== {run}: {model.config.position}{reached} ===\n')
    if compile:
        model.forward = torch.compile(model.forward, dynamic=True)
    generator = torch.Generator(device).manual_seed(seed)       # of all samples: no other seed repeats one
    for _ in range(num_samples):
        decoder, made = codecs.getincrementaldecoder('utf-8')(errors='replace'), ''     # of half letters
        write(tokenizer.decode(prompt[0]))
        with forward_context:
            for token in model.stream(prompt, max_new_tokens, temperature, top_k, top_p, context, generator,
                                      tokenizer.vocab_size):
                piece = decoder.decode(tokenizer.decode_bytes([token.item()]))
                write(piece)
                made = (made + piece)[-len(stop or '') - len(piece):]
                if stop and stop in made:
                    break
        write(decoder.decode(b'', final=True) + '\n' + '-' * 15 + '\n')
