"""
Measuring: a model's loss on a text, token by token and at every length, its answers to word_order's
questions, and how long things take. The training step is here too: train.py trains by it, compare.py and
bench.py time it.
"""
import functools
import hashlib
import json
import math
import os
import re
import sys
import time
from contextlib import nullcontext, suppress

import numpy as np
import torch
from torch.nn import functional as F

from checkpoints import load_checkpoint, make_model
from configurator import fail
from dataset import LARGEST_VOCABULARY, read_ids, write_whole
from machine import autocast
from model import GPT, GPTConfig
from optim import make_optimizers
from runs import open_data

HERE = os.path.dirname(os.path.abspath(__file__))
UNSCALED = torch.amp.GradScaler(enabled=False)          # hands everything through as it is
MOST_KEPT = 2 ** 26             # tokens that keep_on_device() takes: 256 MB; dataset.py has checked their ids


# ------------------------------------------------------------------------------------------------------------
# a training step, and the time that it takes

def training_step(model, optimizers, batch, context, grad_clip, scaler=UNSCALED):
    """
    One step: forward and backward for each micro-batch, an (inputs, targets) of `batch`, then clip and step.

    context     of the forward passes: from machine.autocast()
    grad_clip   the largest norm of the gradient; 0 does not clip
    scaler      for float16, whose small gradients would vanish otherwise; where one overflows nothing steps

    Returns the mean loss and the norm of its gradient, tensors on the device, which only a scaler waits for.
    """
    step_loss = torch.zeros((), device=batch[0][0].device)
    for number, (inputs, targets) in enumerate(batch, start=1):
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):    # exchanges gradients once a step
            model.require_backward_grad_sync = number == len(batch)
        with context:
            _, loss = model(inputs, targets)
        scaler.scale(loss / len(batch)).backward()
        step_loss += loss.detach() / len(batch)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    overflow = scaler.is_enabled() and not norm.isfinite()      # in one gradient, and clipping has spread it
    for optimizer in optimizers:
        if not overflow:
            optimizer.step()                # scaler.step() would look at each optimizer's gradients alone
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return step_loss, norm


def compiled_or_not(model, inputs, targets, context, say):
    """
    The model by torch.compile; or the model itself where that does not work, and then say() gets a line.
    inputs and targets must lie in memory as those in training will: for other strides it would be compiled
    anew.
    """
    compiled = torch.compile(model)
    try:                                                # compiling happens at the first call: does it work?
        with context:
            compiled(inputs, targets)[1].backward()
        model.zero_grad(set_to_none=True)
        return compiled
    except Exception as error:                          # no C++ compiler, an unsupported GPU ...
        say(f'torch.compile does not work here ({type(error).__name__})')
        return model


def waiter(device):
    """A function that returns when the device has done all that it was asked to."""
    return {'cuda': torch.cuda.synchronize, 'mps': torch.mps.synchronize}.get(device.type, lambda: None)


def take_turns(candidates, rounds, wait=lambda: None, clock=time.perf_counter, warm_up=2, enough=math.inf):
    """
    The seconds of every turn, {name: [one for each round]}, of `candidates`, {name: callable}: in each round
    each has one turn, in one order and the next time in the other, so that whatever else the machine does
    falls on all alike.

    wait        returns when the device is idle: from waiter()
    warm_up     turns of each that do not count, before the first round
    enough      seconds after which eight rounds will do
    """
    seconds = {name: [] for name in candidates}
    for act in list(candidates.values()) * warm_up:
        act()
    started = clock()
    for number in range(rounds):
        if number >= 8 and clock() - started > enough:
            break
        for name in list(candidates)[::-1 if number % 2 else 1]:
            wait()
            begun = clock()
            candidates[name]()
            wait()
            seconds[name].append(clock() - begun)
    return seconds


def optimizers_of(model, settings, device_type):
    """The optimizers that a run's settings ask for."""
    names = 'weight_decay', 'learning_rate', 'beta1', 'beta2', 'optimizer', 'muon_learning_rate'
    decay, rate, beta1, beta2, *others = (settings[name] for name in names)
    return make_optimizers(model, decay, rate, (beta1, beta2), device_type, *others,
                           settings.get('position_rate', 1.0))


def step_times(models, settings, block_size, device):
    """
    Seconds that a training step on one micro-batch takes, {name: seconds}, for `models`, {name: model_args}.
    They take turns, for 20 seconds or 40 rounds, and the fastest one counts: what else the machine does can
    only slow a step.
    """
    steps, context = {}, autocast(device, settings['dtype'])
    for name, args in models.items():
        model = GPT(GPTConfig(**args)).to(device)
        optimizers = optimizers_of(model, settings, device.type)
        tokens = torch.randint(args['vocab_size'], (settings['batch_size'], block_size), device=device)
        if settings['compile']:
            model = compiled_or_not(model, tokens, tokens, context, say=lambda line: None)  # train.py says it
        steps[name] = functools.partial(training_step, model, optimizers, [(tokens, tokens)], context,
                                        settings['grad_clip'])
    return {name: min(turns) for name, turns in take_turns(steps, 40, waiter(device), enough=20).items()}


# What GPUs reach in half precision, in FLOP/s, by words of their names; the first that fits
PEAKS = {'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'L40': 181e12,
         'L4': 121e12, 'A10G': 70e12}


def peak_flops(name):
    """The peak of a GPU of that name in half precision, in FLOP/s; None where it is not known."""
    words = set(re.split('[ -]', name))                 # whole words: an L40S is no L4
    return next((peak for key, peak in PEAKS.items() if words.issuperset(key.split())), None)


def utilisation(model, tokens, seconds, dtype):
    """
    Model FLOPs utilisation (MFU): the share of a GPU's peak that the model's own arithmetic uses (PaLM paper,
    appendix B), when it trains on so many tokens in so many seconds; nanoGPT's estimate_mfu. None where the
    peak is not known.
    """
    device, config = model.lm_head.weight.device, model.config
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == 'cuda' else None
    if peak is None or dtype == 'float32':
        return None
    flops_per_token = 6 * model.get_num_params() + 12 * config.n_layer * config.n_embd * config.block_size
    return flops_per_token * tokens / seconds / peak


def peak_memory(device):
    """The most memory that this process has held so far, in MB: on a GPU the most that tensors took of it."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    try:
        with open('/proc/self/status') as file:         # getrusage's peak is inherited from the parent
            return next(int(line.split()[1]) for line in file if line.startswith('VmHWM')) / 2 ** 10
    except OSError:                                     # no Linux
        import resource
        unit = 2 ** 20 if sys.platform == 'darwin' else 2 ** 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# ------------------------------------------------------------------------------------------------------------
# the loss of a model on a text

def window_starts(n_tokens, block_size, n_windows=None):
    """
    Where the windows of an evaluation start: side by side, so that each token but the first is predicted
    once; the last window may be shorter. With n_windows, so many of the whole ones, evenly spaced: the same
    ones for every model and every time.
    """
    starts = np.arange(0, n_tokens - 1, block_size)
    if n_windows is None:
        return starts
    whole = starts[:max((n_tokens - 1) // block_size, 1)]
    return whole[np.linspace(0, len(whole) - 1, min(n_windows, len(whole))).round().astype(int)]


def send(array, device):
    """A NumPy array as a tensor on the device; on a GPU the copy runs beside its work."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == 'cuda' else tensor).to(device, non_blocking=True)


def keep_on_device(tokens, device):
    """All of `tokens` (uint16 array) as a tensor on the device, if there is room for so many; else None."""
    return torch.from_numpy(tokens.astype(np.int32)).to(device) if len(tokens) <= MOST_KEPT else None


def read_windows(tokens, starts, length, device, vocab_size=LARGEST_VOCABULARY):
    """Windows of `length` tokens, from an array or keep_on_device(), and the next token, (.., length + 1)."""
    if isinstance(tokens, torch.Tensor):
        return tokens[send(starts, device)[..., None] + torch.arange(length + 1, device=device)].long()
    return send(read_ids(tokens, starts[..., None] + np.arange(length + 1), vocab_size), device)


@torch.inference_mode()
def sum_of_losses(model, tokens, starts, block_size, batch_size, device, context):
    """
    The model's loss on the windows of `tokens`, see read_windows(), that begin at `starts`: (sum in nats,
    number of tokens predicted).

    A window is block_size tokens read and as many predicted, one further; fewer where the text ends. context:
    from autocast().
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    lengths = np.minimum(block_size, len(tokens) - 1 - starts)
    for length in np.unique(lengths)[::-1]:
        same = starts[lengths == length]
        for i in range(0, len(same), batch_size):
            windows = read_windows(tokens, same[i:i + batch_size], length, device, model.config.vocab_size)
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
    The model's loss at every token of `tokens` (array of ids) but the first: float32 array, one shorter, in
    nats. context: from autocast().

    The text is read in windows of `length` tokens, each as if nothing stood before it. They stand side by
    side, so that a token is predicted from between 1 and `length` tokens; the last window may be shorter.
    With a stride below length they overlap: each begins `stride` tokens after the one before and scores only
    what that one did not reach, so that every token is predicted from at least length - stride + 1 tokens,
    save those in the first window.

    Long windows are read in pieces, through the model's cache, so that memory stays bounded: below 2 GB at
    16,384 tokens. RoPE's dynamic scaling is the exception: where nothing can be kept, a window is read in one
    piece.
    """
    n_tokens = len(tokens) - 1
    stride = min(stride or length, length)
    starts = np.arange(0, max(n_tokens - length, 0) + stride, stride)
    lengths = np.minimum(length, n_tokens - starts)
    # A pass reads some windows' next pieces: about 1024 tokens, at most 2 ** 24 scores a layer, so 64 MB.
    scores_per_token = model.config.n_head * length
    piece = min(max(2 ** 24 // scores_per_token, 1), 256) if model.transformer.wpe.cacheable else length
    batch_size = max(min(2 ** 24 // (scores_per_token * piece), 1024 // min(piece, length)), 1)

    losses = np.empty(n_tokens, dtype=np.float32)
    was_training = model.training
    model.eval()
    for width in np.unique(lengths):
        same = np.flatnonzero(lengths == width)
        for numbers in np.split(same, range(batch_size, len(same), batch_size)):
            windows = read_windows(tokens, starts[numbers], width, device, model.config.vocab_size)
            cache = model.make_cache(len(windows)) if piece < width else None
            pieces = []                                 # (windows, piece) each
            for begin in range(0, width, piece):
                end = min(begin + piece, width)
                inputs, targets = windows[:, begin:end], windows[:, begin + 1:end + 1]
                with context:
                    logits, _ = model(inputs, targets, cache=cache)
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction='none')
                pieces.append(loss.view_as(targets))
            for number, row in zip(numbers, torch.cat(pieces, dim=1).cpu().numpy()):
                reached = starts[number - 1] + length if number > 0 else 0      # by the window before
                losses[reached:starts[number] + width] = row[reached - starts[number]:]
    model.train(was_training)
    return losses


def sweep_plan(block_size, n_tokens, sweep_tokens, multiples):
    """
    The windows' lengths, in tokens, and the part of a text of n_tokens that is scored at each of them:
    (lengths, begin, count). The tokens begin + 1 .. begin + count are predicted at every length; there are
    `begin` tokens before them, so that sliding windows can give all of them long context, and whole windows
    of every length fit into them.
    """
    lengths = [int(block_size * multiple) for multiple in multiples if block_size * multiple % 1 == 0]
    lengths = [length for length in lengths if length <= sweep_tokens and 2 * length < n_tokens]
    if block_size not in lengths:
        fail(f'windows of {block_size} tokens need more than {2 * block_size} tokens of validation text, and '
             f'there are {n_tokens}; and a sweep_tokens of at least {block_size}, which is {sweep_tokens}: '
             'use a larger data set, or raise sweep_tokens')
    begin = lengths[-1]
    return lengths, begin, min(sweep_tokens, n_tokens - 1 - begin) // lengths[-1] * lengths[-1]


def losses_at_length(model, tokens, length, begin, count, stride, device):
    """
    The mean loss on the part of `tokens` that sweep_plan() chose, in nats per token, read in windows of
    `length`: sliding ones, where each token is predicted from at least length - stride + 1 tokens, and those
    side by side, as a user's text is read, where the first tokens of each have little context. None for both
    if the model cannot read so many.
    """
    if length > model.transformer.wpe.longest:
        return None, None
    before = max(length - stride, 0)                    # the first window too scores its last `stride` tokens
    text = tokens[begin - before:begin + count + 1]
    sliding = token_losses(model, text, length, device, nullcontext(), stride)[before:]
    side_by_side = token_losses(model, tokens[begin:begin + count + 1], length, device, nullcontext())
    return sliding.mean(dtype=np.float64), side_by_side.mean(dtype=np.float64)


# ------------------------------------------------------------------------------------------------------------
# word_order's questions

def answer_accuracy(model, tokenizer, examples, device):
    """
    The share of word_order's `examples`, (prompt, answer) with words in both, that the model answers rightly
    by its likeliest token.
    """
    by_length, right = {}, 0
    for prompt, answer in examples:
        tokens = tokenizer.encode('\n' + ' '.join(prompt)), tokenizer.encode(' ' + answer)[0]
        by_length.setdefault(len(prompt), []).append(tokens)
    with torch.inference_mode():
        for pairs in by_length.values():
            for i in range(0, len(pairs), 250):
                prompts, answers = (torch.from_numpy(np.array(part).astype(np.int64)).to(device)
                                    for part in zip(*pairs[i:i + 250]))
                right += (model(prompts)[0][:, -1].argmax(dim=-1) == answers).sum().item()
    return right / len(examples)


def answers_by_clauses(model, data, device):
    """
    word_order's accuracies by the number of clauses in a sentence, {clauses: share}: on the validation
    sentences, whose words no training sentence has together, and on new ones up to four times as long. None
    where the model cannot read so many tokens.
    """
    from data.word_order import sentences               # which only its own runs need
    trained = len(data.meta['notes']['bag_of_words'])
    examples = {}
    for line in filter(None, data.tokenizer.decode(data.tokens('val')).split('\n')):
        *prompt, answer = line.split()
        clauses = (len(prompt) - 5) // 4                # 4 words a clause; tag and question are 5 more
        examples.setdefault(clauses, []).append((prompt, answer))
    for clauses in sorted({trained + 1, 2 * trained, 3 * trained, 4 * trained}):
        if clauses <= sentences.MOST_CLAUSES:
            examples[clauses] = sentences.examples(1000, clauses, seed=clauses)
    return {clauses: answer_accuracy(model, data.tokenizer, examples[clauses], device)
            if 4 * clauses + 6 <= model.transformer.wpe.longest else None               # '\n' and the prompt
            for clauses in sorted(examples)}


# ------------------------------------------------------------------------------------------------------------
# runs: all that tables and pictures need to know of one

def load_model(run, device, **changes):
    """The model of a run of read_run()'s, with its last weights, and some of its settings changed."""
    path = os.path.join(run.folder, 'last.pt')
    return make_model(load_checkpoint(path), path, **changes).to(device).eval()


# Where the second half of shakespeare_char's validation text begins: Macbeth and The Tempest.
MACBETH = 'First Witch:\nWhen shall we three meet again'


def tokens_of_choice(run, data):
    """
    How many of the validation text's first tokens are no judge of a run, since settings were chosen on them:
    the plays Twelfth Night and King John, which tune.py chose config/NAME.py's on. None of other data sets.
    """
    if run.settings['dataset'] != 'shakespeare_char':
        return 0
    return data.tokenizer.decode(data.tokens('val')).index(MACBETH)


def fingerprint(settings, model_args):
    """
    What the code makes of a scheme: the losses of three training steps of a tiny model with its options,
    always on the same tokens, on the CPU. Runs whose fingerprints differ by over 1e-4 are of different code.
    """
    tiny = dict(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=32, dropout=0.0)
    with torch.random.fork_rng(devices=[]), torch.device('cpu'):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**{**model_args, **tiny}))
        for parameter in model.parameters():            # with larger weights than a GPT's first ones, which
            if parameter.dim() > 1:                     # hardly look anywhere, the loss depends on where
                parameter.data *= 20
        optimizers = optimizers_of(model, settings, 'cpu')
        tokens = torch.randint(32, (4, 65))
        batch = [(tokens[:, :-1], tokens[:, 1:])]
        return [training_step(model, optimizers, batch, nullcontext(), 1.0)[0].item() for _ in range(3)]


def code_version():
    """A hash of the code that decides what an evaluation finds."""
    version = hashlib.sha256(torch.__version__.encode())
    for name in ('model.py', 'rope_scaling.py', 'checkpoints.py', 'runs.py', 'dataset.py', 'measure.py',
                 'data/word_order/sentences.py'):
        with suppress(FileNotFoundError), open(os.path.join(HERE, name), 'rb') as file:
            version.update(file.read())
    return version.hexdigest()


def hash_line(content):
    return hashlib.sha256(content).hexdigest().encode() + b'\n'


def read_kept(path):
    """What evaluate() has kept in a file, below its hash; None if it is not there, or not as written."""
    with suppress(OSError), open(path, 'rb') as file:
        line, content = file.readline(), file.read()
        return json.loads(content) if line == hash_line(content) else None


def evaluate(run, block_size, sweep, stride, device, code):
    """
    What a run's last weights reach on the validation text, in float32: a dictionary with

        val_loss        mean loss over the whole text, in windows of block_size, as in the last row of log.csv
        report_loss     the same without tokens_of_choice(): over what no setting was chosen on
        curve_end       the same over the windows that the run was scored on during training
        by_window       mean loss in each whole window
        by_position     mean loss at each position in these windows
        by_length       {length: what losses_at_length() says}, by sweep_plan()'s `sweep`
        answers         word_order's accuracies

    It takes a minute or so, so it is kept in the run's folder, as evaluation.json, and made anew when the
    weights, the data, the sweep or the code, a code_version(), are others. Without last.pt it stays.
    """
    weights, path = (os.path.join(run.folder, name) for name in ('last.pt', 'evaluation.json'))
    plan, found = [block_size, *sweep, stride], read_kept(path)
    if not os.path.exists(weights):
        if found is None or found['plan'] != plan:
            fail(f'{run.folder} has no last.pt, and its evaluation.json is of other windows than these; '
                 'compare it as it was, or take the whole run')
    else:
        try:
            with open(weights, 'rb') as file:
                digest = hashlib.file_digest(file, 'sha256').hexdigest()
        except OSError as error:
            fail(f'{weights} cannot be read ({error.strerror}); check it, or take the run from another copy')
        what = [digest, code, run.data, run.model_args, device.type, plan]
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        if found is None or found['key'] != key:
            found = dict(key=key, plan=plan, **evaluate_anew(run, block_size, sweep, stride, device))
            content = json.dumps(found).encode()
            with suppress(OSError):                     # a folder that is not to be written to
                write_whole(path, lambda file: file.write(hash_line(content) + content))
            found = json.loads(content)
    for key in ('by_length', 'answers'):                # JSON's keys are text
        found[key] = {int(number): value for number, value in found[key].items()}
    return found


def evaluate_anew(run, block_size, sweep, stride, device):
    model, data = load_model(run, device), open_data(run)
    tokens, (lengths, *part) = data.tokens('val'), sweep
    losses = token_losses(model, tokens, block_size, device, nullcontext())
    windows = losses[:len(losses) // block_size * block_size].reshape(-1, block_size)
    scored = window_starts(len(tokens), block_size, run.settings['eval_windows']) // block_size
    by_length = {length: losses_at_length(model, tokens, length, *part, stride, device) for length in lengths}
    return dict(
        val_loss=float(losses.mean(dtype=np.float64)),
        report_loss=float(losses[tokens_of_choice(run, data):].mean(dtype=np.float64)),
        curve_end=float(windows[scored].mean()),
        by_window=windows.mean(axis=1, dtype=np.float64).round(5).tolist(),
        by_position=windows.mean(axis=0, dtype=np.float64).round(6).tolist(),
        by_length={length: [value if value is None else float(value) for value in found]
                   for length, found in by_length.items()},
        answers=answers_by_clauses(model, data, device) if run.settings['dataset'] == 'word_order' else {})
