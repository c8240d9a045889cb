"""
Runs: what train.py, sample.py, compare.py and bench.py share about a device, a checkpoint and the loss of a model on a text.
"""
import contextlib
import errno
import os
import pickle
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import torch
from torch.nn import functional as F

from configurator import fail
from model import GPT, GPTConfig

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


# ----------------------------------------------------------------------------------------------------------------------
# the machine

def pick_device(name):
    """The torch device for the setting `device`: 'auto' takes CUDA, else MPS, else the CPU. One line for what is not there."""
    if name == 'auto':
        return torch.device('cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu')
    try:
        device = torch.device(name)
    except RuntimeError:
        fail(f'there is no device {name!r}; use auto, cpu, cuda, cuda:0 or mps')
    if device.type not in ('cpu', 'cuda', 'mps'):
        fail(f'device {name!r} is not supported; use auto, cpu, cuda, cuda:0 or mps')
    if device.type == 'cuda' and not torch.cuda.is_available():
        fail(f'device {name!r} was asked for, but PyTorch finds no CUDA GPU here; use --device=cpu')
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        fail(f'device {name!r} was asked for, but there are only {torch.cuda.device_count()} GPUs; count from cuda:0')
    if device.type == 'mps' and not torch.backends.mps.is_available():
        fail(f'device {name!r} was asked for, but PyTorch finds no MPS here; use --device=cpu')
    return device


def autocast(device, dtype):
    """The context in which forward passes run: matrix products in `dtype`; for float32 none."""
    if dtype not in DTYPES:
        fail(f'dtype must be one of {", ".join(DTYPES)}, not {dtype!r}')
    return contextlib.nullcontext() if dtype == 'float32' else torch.autocast(device.type, dtype=DTYPES[dtype])


def peak_memory(device):
    """The most memory that this process has held so far, in MB: on a GPU the most of the GPU's that tensors took."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    try:
        with open('/proc/self/status') as file:         # not getrusage's peak, which a process inherits from the one that started it
            return next(int(line.split()[1]) for line in file if line.startswith('VmHWM')) / 2 ** 10
    except OSError:                                     # no Linux
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 20 if sys.platform == 'darwin' else 2 ** 10)


def git_commit(folder=os.path.dirname(os.path.abspath(__file__))):
    """The commit that is checked out in a folder, by default this one, with '-dirty' behind it if files differ; '' where there is none."""
    try:
        command = ['git', 'describe', '--always', '--dirty', '--abbrev=40']
        return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout.strip()
    except OSError:                                     # no git here
        return ''


# ----------------------------------------------------------------------------------------------------------------------
# files

def write_whole(path, write):
    """Writes a file beside, flushes it to the disk and renames it: `path` always holds a whole file, the old or the new one.
    write(file) gets a binary file. Ends the script with one line if the disk is full or the like."""
    part = f'{path}.{os.getpid()}.part'
    try:
        with open(part, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:            # torch.save hides a full disk behind a RuntimeError of its own
        cause = error if isinstance(error, OSError) else error.__context__
        reason = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(error).splitlines()[0]
        full = not isinstance(cause, OSError) or cause.errno == errno.ENOSPC
        fail(f'{path} could not be written ({reason}); what was there before is whole: '
             + ('free some space, then resume' if full else 'see whether that folder may be written to, or choose another'))
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)


def need_folder(path):
    """Ends the script with one line unless files can be written to the folder `path`, whether it is there or is yet to be made."""
    if path.startswith('~'):
        fail(f'{path} would be a folder called ~, since the shell has left it as it is; write the path out, or a blank in place of =')
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        fail(f'nothing can be written to {path}, since {there} is a file; choose another folder')
    if not os.access(there, os.W_OK | os.X_OK):
        fail(f'nothing can be written to {path}: {there} is not yours to write to; choose another folder')


def checkpoint_path(run):
    """The best checkpoint of a run, from its folder; or the checkpoint itself, where that is named."""
    return run if run.endswith('.pt') else os.path.join(run, 'ckpt.pt')


def load_checkpoint(path, device='cpu', remedy='take it from another copy, or train again'):
    """A checkpoint of train.py's (or nanoGPT's), unpickled by a loader that knows tensors and plain values only. One line on faults."""
    if os.path.isdir(path):
        fail(f'{path} is a directory; name the checkpoint in it')
    if not os.path.exists(path):
        fail(f'there is no checkpoint {path}; train a run first, or check the path')
    try:
        if zipfile.is_zipfile(path):                    # as all but very old checkpoints are; torch.load ignores its check sums
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    raise zipfile.BadZipFile
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')             # of what an error will follow: one line is enough
            checkpoint = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        fail(f'{path} holds more than tensors and plain values, or is damaged, and is not opened; {remedy}')
    except Exception as error:                          # damage shows in many ways
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno == errno.EACCES else 'it is cut short or damaged'
        fail(f'{path} cannot be read ({reason}); {remedy}')
    if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get('model'), dict)
            and isinstance(checkpoint.get('model_args'), dict)):
        fail(f'{path} is no checkpoint of a GPT: it lacks model or model_args; {remedy}')
    try:
        checkpoint['model_args'] = vars(GPTConfig(**checkpoint['model_args']))
    except (TypeError, ValueError) as error:
        fail(f'{path} describes a model that cannot be: {error}; {remedy}')
    return checkpoint


def make_model(checkpoint, path, **changes):
    """The model of a checkpoint, with some of its settings changed (such as rope_scaling='yarn'). One line where that cannot be."""
    try:
        config = GPTConfig(**{**checkpoint['model_args'], **changes})
    except (TypeError, ValueError) as error:
        fail(f'{path}: {error}')
    try:
        model = GPT(config)
        # torch.compile and nanoGPT leave their marks in the names
        weights = {name.removeprefix('_orig_mod.'): tensor for name, tensor in checkpoint['model'].items()
                   if not name.endswith(('.attn.bias', '.attn.masked_bias'))}
        model.load_state_dict(weights)
    except (RuntimeError, AttributeError, TypeError) as error:
        fail(f'{path}: its weights do not fit a model with these settings ({str(error).splitlines()[-1].strip()[:150]}); leave out what '
             'changes its sizes')
    return model


# ----------------------------------------------------------------------------------------------------------------------
# the loss of a model on a text

def window_starts(n_tokens, block_size, n_windows=None):
    """
    Where the windows of an evaluation start: side by side, so that each token but the first is predicted once; the last window may
    be shorter. With n_windows, so many of the whole ones, evenly spaced: the same ones for every model and every time.
    """
    starts = np.arange(0, n_tokens - 1, block_size)
    if n_windows is None:
        return starts
    whole = starts[:max((n_tokens - 1) // block_size, 1)]
    return whole[np.linspace(0, len(whole) - 1, min(n_windows, len(whole))).round().astype(int)]


@torch.inference_mode()
def sum_of_losses(model, tokens, starts, block_size, batch_size, device, context):
    """
    The model's loss on the windows of `tokens` (uint16 array) that begin at `starts`: (sum in nats, number of tokens predicted).

    A window is block_size tokens read and as many predicted, one further; fewer where the text ends. context: from autocast().
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    lengths = np.minimum(block_size, len(tokens) - 1 - starts)
    for length in np.unique(lengths)[::-1]:
        same = starts[lengths == length]
        for i in range(0, len(same), batch_size):
            windows = torch.from_numpy(tokens[same[i:i + batch_size, None] + np.arange(length + 1)].astype(np.int64)).to(device)
            with context:
                _, loss = model(windows[:, :-1], windows[:, 1:])
            predicted = windows[:, 1:].numel()
            total += loss.item() * predicted
            count += predicted
    model.train(was_training)
    return total, count


@torch.inference_mode()
def token_losses(model, tokens, length, device, context, stride=None):
    """
    The model's loss at every token of `tokens` (array of ids) but the first: float32 array, one shorter, in nats. context: from autocast().

    The text is read in windows of `length` tokens, each as if nothing stood before it. They stand side by side, so that a token is
    predicted from between 1 and `length` tokens; the last window may be shorter. With a stride below length they overlap: each begins
    `stride` tokens after the one before and scores only what that one did not reach, so that every token is predicted from at least
    length - stride + 1 tokens, save those in the first window.

    Long windows are read in pieces, through the model's cache, so that memory stays bounded: below 2 GB at 16,384 tokens. RoPE's dynamic
    scaling is the exception: beyond its original length a window is read in one piece, with the frequencies that its length calls for.
    """
    n_tokens = len(tokens) - 1
    stride = min(stride or length, length)
    starts = np.arange(0, max(n_tokens - length, 0) + stride, stride)
    lengths = np.minimum(length, n_tokens - starts)
    # A pass reads some windows' next pieces: about 1024 tokens, but no more than 2 ** 24 attention scores, 64 MB, in a layer.
    scores_per_token = model.config.n_head * length
    piece = min(max(2 ** 24 // scores_per_token, 1), 256) if model.transformer.wpe.cacheable else length
    batch_size = max(min(2 ** 24 // (scores_per_token * piece), 1024 // min(piece, length)), 1)

    losses = np.empty(n_tokens, dtype=np.float32)
    was_training = model.training
    model.eval()
    for width in np.unique(lengths):
        same = np.flatnonzero(lengths == width)
        for numbers in np.split(same, range(batch_size, len(same), batch_size)):
            windows = torch.from_numpy(tokens[starts[numbers, None] + np.arange(width + 1)].astype(np.int64)).to(device)
            cache = model.make_cache(len(windows)) if piece < width else None
            pieces = []                                 # (windows, piece) each
            for begin in range(0, width, piece):
                end = min(begin + piece, width)
                inputs, targets = windows[:, begin:end], windows[:, begin + 1:end + 1]
                with context:
                    logits, _ = model(inputs, targets, cache=cache)
                pieces.append(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction='none').view_as(targets))
            for number, row in zip(numbers, torch.cat(pieces, dim=1).cpu().numpy()):
                reached = starts[number - 1] + length if number > 0 else 0      # the tokens that the window before has scored
                losses[reached:starts[number] + width] = row[reached - starts[number]:]
    model.train(was_training)
    return losses
