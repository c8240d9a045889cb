"""
How fast is it, beside nanoGPT and others, on this machine?

    python bench.py                                         # all parts but race and gpu: some minutes
    python bench.py --peer=../nanoGPT                       # the same beside a checkout of nanoGPT
    python bench.py --peer=../nanoGPT --parts=race          # both train on tinyshakespeare for the same time
    python bench.py --parts=gpu                             # what train.py does on a GPU, within ten minutes
    python bench.py --parts=step --compile --dtype=bfloat16 # the largest step also compiled and in bfloat16

Its peers are nanoGPT and, where they are installed, transformers and x-transformers. --peer names a folder
whose model.py is imported, which EXECUTES it: name only one that you trust.

Every figure is a median of repetitions that take turns, see measure.take_turns(). A ratio is a candidate's
time over that of the model it is measured by: below 1 is faster. Prints Markdown tables and writes
bench.json, part by part, so that a run that is stopped keeps the parts that are done; parts that the file has
from before are kept unless they are measured anew.
"""
import contextlib
import csv
import datetime
import functools
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time

from configurator import configure, count, declared_settings, fail, scheme_options

# ------------------------------------------------------------------------------------------------------------
parts = 'step,schemes,sample,data,long' # what to measure; 'race' too, which needs a peer, or 'gpu'
peer: str = None                # a checkout of nanoGPT; its model.py is executed
repetitions: count = 15         # rounds; sample and long, whose turns are long, take at most 3
out = 'bench.json'              # where the numbers go
seed = 1337                     # of weights, tokens and samples
# the machine
device = 'auto'                 # auto, cpu, cuda, cuda:0, mps; race is about CPUs and takes the cpu
dtype: str = None               # step: the largest size in bfloat16 too; None: in float32 alone, as all else
compile = False                 # step: the largest size by torch.compile too
# ------------------------------------------------------------------------------------------------------------
if __name__ == '__main__':      # tests, and the processes of `long`, import the functions below
    settings, given, _ = configure(globals(), __file__, arguments_are='')

import numpy as np              # after configure(), so that --help and mistakes in flags answer at once
import torch
from torch.nn import functional as F

import model as ours
from dataset import Dataset, prepare_if_missing, write_whole
from machine import autocast, git_commit, pick_device
from measure import (compiled_or_not, load_model, peak_memory, read_windows, step_times, sum_of_losses,
                     take_turns, token_losses, training_step, utilisation, waiter, window_starts)
from runs import need_folder, open_data, read_run
from settle import settle
from tables import last_line, named, table

HERE = os.path.dirname(os.path.abspath(__file__))
PARTS = ('step', 'schemes', 'sample', 'data', 'long', 'race', 'gpu')
VOCABULARY = 65                 # tinyshakespeare's
SMALL = dict(n_layer=4, n_head=4, n_embd=128)               # nanoGPT's recipe for a CPU
BABY = dict(n_layer=6, n_head=6, n_embd=384)                # its recipe for a GPU, "baby GPT"
STEPS = ((16, 256, SMALL), (12, 64, SMALL), (8, 256, BABY))             # batch size, block size, model
SCHEME_STEPS = ((64, 64, SMALL), (16, 256, SMALL), (4, 1024, SMALL))    # 4,096 tokens each
CPU = torch.device('cpu')


# ------------------------------------------------------------------------------------------------------------
# measuring

def report(title, seconds, base, items, unit):
    """
    Prints as a table what take_turns() found, and returns it, {name: numbers}: median seconds, items (so many
    to a turn) per second, ratio of the median to that of `base`, and low and high, the quartiles of the
    ratios of the single rounds.
    """
    result, rows = {}, []
    for name, turns in seconds.items():
        median = np.median(turns)
        low, high = np.quantile(np.divide(turns, seconds[base]), (0.25, 0.75))
        ratio = median / np.median(seconds[base])
        numbers = dict(seconds=median, per_second=items / median, ratio=ratio, low=low, high=high)
        result[name] = {key: float(value) for key, value in numbers.items()}
        rows.append([name, f'{1000 * median:,.2f}', f'{items / median:,.0f}', f'{ratio:.2f}',
                     f'{low:.2f} .. {high:.2f}'])
    header = [title, 'ms', f'{unit}/s', f'time / {base}', 'middle half of the rounds']
    print(table(header, rows) + '\n', flush=True)
    return result


def titled(batch_size, block_size, sizes):
    layers, heads, width = sizes['n_layer'], sizes['n_head'], sizes['n_embd']
    return f'B{batch_size} T{block_size}, {layers} layers, {heads} heads, width {width}'


# ------------------------------------------------------------------------------------------------------------
# models, ours and others'

def load_peer(folder):
    """nanoGPT's model.py in `folder`, as a module: this executes it. One line if it is something else."""
    path = os.path.join(folder, 'model.py')
    if not folder or not os.path.isfile(path):
        fail(f'there is no model.py in {folder!r}; '
             '--peer names a checkout of nanoGPT, as in --peer=../nanoGPT')
    spec = importlib.util.spec_from_file_location('peer_model', path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        module.GPT, module.GPTConfig
    except (Exception, SystemExit) as error:
        fail(f'{path} cannot be imported as a model ({type(error).__name__}: {error}); '
             '--peer names a checkout of nanoGPT')
    return module


def make_gpt(module, block_size, sizes, machine, seed, vocab_size=VOCABULARY, **options):
    """A GPT of ours or of nanoGPT's, whichever module it is, without biases and dropout."""
    torch.manual_seed(seed)
    config = module.GPTConfig(block_size=block_size, vocab_size=vocab_size, bias=False, dropout=0.0, **sizes,
                              **options)
    with contextlib.redirect_stdout(io.StringIO()):     # nanoGPT's reports its number of parameters
        return module.GPT(config).to(machine)


class WithLoss(torch.nn.Module):
    """Another library's model, which maps tokens to logits, called as ours and nanoGPT's are."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        logits = self.model(inputs)
        logits = getattr(logits, 'logits', logits)      # transformers packs them
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizers_of(model, machine):
    """AdamW, in a list, by the model's own configure_optimizers; where it has none, as ours makes it."""
    if not hasattr(model, 'configure_optimizers'):
        fused = {'fused': True} if machine.type in ('cpu', 'cuda') else {}              # as ours
        return [torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, **fused)]
    with contextlib.redirect_stdout(io.StringIO()):     # nanoGPT's reports what it decays
        return [model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), machine.type)]


def library_models(block_size, sizes):
    """The like models of other libraries, those that are installed: {name: model}."""
    models, width, heads = {}, sizes['n_embd'], sizes['n_head']
    with contextlib.suppress(ImportError):
        from transformers import GPT2Config, GPT2LMHeadModel            # has biases, which cannot be left out
        models['transformers GPT-2'] = GPT2LMHeadModel(GPT2Config(
            vocab_size=VOCABULARY, n_positions=block_size, **sizes, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0, attn_implementation='sdpa'))
    with contextlib.suppress(ImportError):
        from x_transformers import Decoder, TransformerWrapper      # has no flash attention with T5's bias
        schemes = {'RoPE': dict(attn_flash=True, rotary_pos_emb=True, rotary_emb_dim=width // heads),
                   'ALiBi': dict(attn_flash=True, alibi_pos_bias=True), 'T5': dict(rel_pos_bias=True)}
        for name, options in schemes.items():
            decoder = Decoder(dim=width, depth=sizes['n_layer'], heads=heads, attn_dim_head=width // heads,
                              **options)
            models[f'x-transformers {name}'] = TransformerWrapper(
                num_tokens=VOCABULARY, max_seq_len=block_size, attn_layers=decoder, use_abs_pos_emb=False,
                tie_embedding=True)
    return {name: WithLoss(model) for name, model in models.items()}


def training_steps(batch_size, block_size, sizes, machine, seed, schemes=ours.SCHEMES, nanogpt=None,
                   libraries=False, variants=()):
    """
    The training steps of our schemes and of the peers, {name: callable}, in float32, always on the same
    tokens. nanogpt: from load_peer(). variants: (compiled, dtype) pairs, in which our rope (on a GPU all
    schemes) and nanoGPT step once more.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch_size, block_size + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous().to(machine), tokens[:, 1:].contiguous().to(machine)
    steps = {}
    for compiled, precision in ((False, 'float32'), *variants):
        context = autocast(machine, precision)
        words = ', compiled' * compiled + f', {precision}' * (precision != 'float32')
        models = {name: make_gpt(ours, block_size, sizes, machine, seed, position=name) for name in schemes
                  if not words or name == 'rope' or machine.type == 'cuda'}
        if nanogpt is not None:
            models['nanoGPT'] = make_gpt(nanogpt, block_size, sizes, machine, seed)
        if libraries and not words:
            models.update(library_models(block_size, sizes))
        for name, raw_model in models.items():
            name, model, optimizers = name + words, raw_model.to(machine), optimizers_of(raw_model, machine)
            if compiled:
                model = compiled_or_not(raw_model, inputs, targets, context,
                                        say=lambda reason: print(f'{name} is left out: {reason}'))
                if model is raw_model:
                    continue
            batch = [(inputs, targets)]
            steps[name] = functools.partial(training_step, model, optimizers, batch, context, 1.0)
    return steps


# ------------------------------------------------------------------------------------------------------------
# the parts: each prints its tables and returns its numbers

def measure_steps(sizes, machine, rounds, seed, base, variants=(), **options):
    results = {}
    for size in sizes:
        last = size is sizes[-1]
        steps = training_steps(*size, machine, seed, variants=variants if last else (), **options)
        seconds = take_turns(steps, rounds, waiter(machine))
        results[titled(*size)] = report(titled(*size), seconds, base, size[0] * size[1], 'tokens')
    return results


def measure_sample(machine, rounds, seed, nanogpt=None, models=(BABY, SMALL), block_size=256, tokens=1000,
                   full=64):
    """
    One text from nothing. nanoGPT reads its whole window again for every token, so that a token costs the
    same once the window is full: it is measured for the first block_size tokens and for `full` more with a
    full window, and extrapolated to `tokens`.
    """
    results, wait, options = {}, waiter(machine), dict(temperature=0.8, top_k=200)
    start, window = (torch.zeros(1, length, dtype=torch.int64, device=machine) for length in (1, block_size))
    for sizes in models:
        marks, candidates, base = {'rope': [], 'learned': []}, {}, 'learned'
        for scheme in marks:
            model = make_gpt(ours, block_size, sizes, machine, seed, position=scheme).eval()

            def generate(model=model, marks=marks[scheme]):     # GPT.generate, with a clock for each quarter
                made, clock = [start], [time.perf_counter()]
                generator = torch.Generator(machine).manual_seed(seed)
                for token in model.stream(start, tokens, **options, generator=generator):
                    made.append(token)
                    if (len(made) - 1) % (tokens // 4) == 0:
                        wait()
                        clock.append(time.perf_counter())
                torch.cat(made, dim=1)
                marks.append((clock[1] - clock[0], clock[4] - clock[3]))
            model.generate(start, 2)                    # warms up; whole turns would take long
            candidates[scheme] = generate
        if nanogpt is not None:
            other = make_gpt(nanogpt, block_size, sizes, machine, seed).eval()
            other.generate(start, 2)
            candidates['first'] = functools.partial(other.generate, start, block_size, **options)
            candidates['full'] = functools.partial(other.generate, window, full, **options)
        seconds = take_turns(candidates, rounds, wait, warm_up=0)
        if nanogpt is not None:
            base = 'nanoGPT, extrapolated'
            seconds[base] = [first + more / full * (tokens - block_size)
                             for first, more in zip(seconds.pop('first'), seconds.pop('full'))]
        title = f'{tokens:,} tokens, {titled(1, block_size, sizes)}'
        results[title] = report(title, seconds, base, tokens, 'tokens')
        for scheme in marks:
            first, last = np.median(marks[scheme], axis=0) / (tokens // 4)
            results[title][scheme].update(first_quarter=float(first), last_quarter=float(last))
            print(f'{scheme}: {1000 * first:.2f} ms a token in the first quarter, '
                  f'{1000 * last:.2f} ms in the last')
        if nanogpt is not None:
            print(f'nanoGPT is extrapolated from its first {block_size} tokens and {full} more with a full '
                  'window, from which it then\npredicts; ours predicts from '
                  f'{block_size // 2} to {block_size} tokens: see GPT.stream.')
        print(flush=True)
    return results


def gathered_batch(path, batch_size, block_size, machine):
    """A batch as train.py draws it from large data: one gather of windows, one copy to the device."""
    tokens = np.memmap(path, dtype='<u2', mode='r')
    starts = torch.randint(len(tokens) - block_size, (batch_size,)).numpy()
    windows = read_windows(tokens, starts, block_size, machine)
    return windows[:, :-1], windows[:, 1:]


def stacked_batch(path, batch_size, block_size, machine):
    """A batch as nanoGPT's train.py draws it: inputs and targets stacked, slice by slice."""
    data = np.memmap(path, dtype=np.uint16, mode='r')
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i:i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1:i + 1 + block_size]).astype(np.int64)) for i in ix])
    if machine.type == 'cuda':
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(machine, non_blocking=True), y.to(machine, non_blocking=True)


def measure_data(machine, rounds, seed, batches=50):
    """Batches drawn from a file of a million tokens."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'train.bin')
        np.random.default_rng(seed).integers(VOCABULARY, size=10 ** 6, dtype=np.uint16).tofile(path)
        for batch_size, block_size in ((12, 64), (8, 128), (64, 256)):
            def drawing(draw):
                return lambda: [draw(path, batch_size, block_size, machine) for _ in range(batches)]
            candidates = {'ours': drawing(gathered_batch), 'nanoGPT': drawing(stacked_batch)}
            seconds = take_turns(candidates, rounds, waiter(machine))
            title = f'{batches} batches, B{batch_size} T{block_size}'
            results[title] = report(title, seconds, 'nanoGPT', batches, 'batches')
    return results


def score_window(scheme, scaling, length, device, seed):
    """In a process of its own: scores a window of `length` tokens; prints seconds and peak memory as JSON."""
    machine = torch.device(device)
    model = make_gpt(ours, 128, SMALL, machine, int(seed), position=scheme, rope_scaling=scaling)
    tokens = np.random.default_rng(int(seed)).integers(VOCABULARY, size=int(length) + 1, dtype=np.uint16)
    token_losses(model, tokens[:129], 128, machine, contextlib.nullcontext())           # warms up
    before, begun = peak_memory(machine), time.perf_counter()
    token_losses(model, tokens, int(length), machine, contextlib.nullcontext())
    seconds = time.perf_counter() - begun
    print(json.dumps(dict(seconds=seconds, peak_mb=peak_memory(machine), before_mb=before)))


def run_child(*command):
    """Runs Python with this process's number of threads; returns what it prints. One line if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=HERE, capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': str(torch.get_num_threads())})
    if done.returncode != 0:
        fail(f'`python {" ".join(command)}` ended with exit status {done.returncode} '
             f'({last_line(done.stderr)}); is there enough memory?')
    return done.stdout


def measure_long(machine, rounds, seed, schemes=ours.SCHEMES, lengths=(4096, 16384)):
    """
    Evaluation on one long window, {scheme, length: numbers}: seconds, and the peak memory of a process that
    does nothing else.
    """
    candidates = {**{name: (name, 'none') for name in schemes}, 'rope, dynamic': ('rope', 'dynamic')}
    longest = {name: make_gpt(ours, 128, SMALL, CPU, seed, position=name).transformer.wpe.longest
               for name in schemes}
    turns = {(name, length): [] for name in candidates for length in lengths
             if length <= longest.get(name, math.inf)}
    for (name, length), found in list(turns.items()) * rounds:
        words = [*candidates[name], str(length), str(machine), str(seed)]
        child = run_child('-c', 'import sys, bench; bench.score_window(*sys.argv[1:])', *words)
        found.append(json.loads(child))
    results, rows = {}, []
    for (name, length), found in turns.items():
        row = {key: float(np.median([turn[key] for turn in found])) for key in found[0]}
        results[f'{name}, {length}'] = row
        rows.append([name, f'{length:,}', f'{row["seconds"]:.2f}', f'{row["peak_mb"]:,.0f}',
                     f'{row["before_mb"]:,.0f}'])
    for name in schemes:
        if longest[name] < max(lengths):
            rows.append([name, 'table ends', '-', '-', '-'])
            results[name] = 'table ends'
    print(table(['scheme', 'tokens', 'seconds', 'peak MB', 'of these before'], rows) + '\n', flush=True)
    return results


# ------------------------------------------------------------------------------------------------------------
# the race

def train_peer(nanogpt, data, seed, steps=2000, warm_up=100, batch_size=12, block_size=64):
    """nanoGPT's recipe for shakespeare_char on a CPU: (seconds, loss on all of the validation text)."""
    model = make_gpt(nanogpt, block_size, SMALL, CPU, seed, data.vocab_size)
    optimizers, path = optimizers_of(model, CPU), os.path.join(data.folder, 'train.bin')
    begun = time.perf_counter()
    for step in range(steps):
        cosine = (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2
        rate = 1e-3 * (step + 1) / (warm_up + 1) if step < warm_up else 1e-4 + (1e-3 - 1e-4) * cosine
        for group in optimizers[0].param_groups:
            group['lr'] = rate
        batch = [stacked_batch(path, batch_size, block_size, CPU)]
        training_step(model, optimizers, batch, contextlib.nullcontext(), 1.0)
    seconds, tokens = time.perf_counter() - begun, data.tokens('val')
    # nanoGPT views its targets as a line, which the slices that sum_of_losses() cuts do not allow
    model.register_forward_pre_hook(lambda module, inputs: tuple(one.contiguous() for one in inputs))
    starts = window_starts(len(tokens), block_size)
    total, count = sum_of_losses(model, tokens, starts, block_size, 64, CPU, contextlib.nullcontext())
    return seconds, total / count


def train_ours(steps, eval_interval, seed, *flags, block_size=None):
    """
    log.csv of a run of train.py's with its CPU defaults: (seconds, validation loss) of every row. With a
    block_size also its loss over all of the validation text in windows of that, else None.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = os.path.join(folder, 'run')
        run_child('train.py', 'config/rope.py', '--dataset=tinyshakespeare', '--device=cpu', f'--seed={seed}',
                  f'--max_iters={steps}', f'--eval_interval={eval_interval}', f'--out_dir={run}', *flags)
        with open(os.path.join(run, 'log.csv'), newline='') as file:
            rows = [(float(row['seconds']), float(row['val_loss'])) for row in csv.DictReader(file)]
        return rows, None if block_size is None else loss_in_windows(run, block_size)


def loss_in_windows(folder, block_size):
    run = read_run(folder)
    tokens = open_data(run).tokens('val')
    starts = window_starts(len(tokens), block_size)
    total, count = sum_of_losses(load_model(run, CPU), tokens, starts, block_size, 64, CPU,
                                 contextlib.nullcontext())
    return total / count


def time_of_passing(rows, loss):
    """When `rows`, (seconds, loss) each, came down to `loss`, by lines between them; None for never."""
    for (begin, above), (end, below) in zip([rows[0], *rows], rows):
        if below <= loss:
            return end if above <= loss else begin + (end - begin) * (above - loss) / (above - below)
    return None


def measure_race(nanogpt, seed):
    """nanoGPT's recipe for a CPU, and our defaults for one given the time that it took."""
    peer_seconds, peer_loss = train_peer(nanogpt, Dataset(prepare_if_missing('tinyshakespeare')), seed)
    # How many steps of ours is that, with ten evaluations, as by default? A probe has one before its
    # first step and another after 80: first = evaluation + 80 steps, both = 2 evaluations + 100 steps.
    (_, (first, _), (both, _)), _ = train_ours(100, 80, seed)
    step = (2 * first - both) / 60
    steps = max(int((peer_seconds - 10 * max(first - 80 * step, 0)) / step), 20)
    rows, loss_at_64 = train_ours(steps, math.ceil(steps / 10), seed, block_size=64)
    seconds, loss = rows[-1]
    passing = time_of_passing(rows, peer_loss)
    print(table(['trained on tinyshakespeare', 'seconds', 'steps', 'validation loss', 'in windows of 64'],
                [["nanoGPT's recipe for a CPU, block 64", f'{peer_seconds:.1f}', '2,000', f'{peer_loss:.4f}',
                  f'{peer_loss:.4f}'],
                 ['ours, config/rope.py, block 128', f'{seconds:.1f}', f'{steps:,}', f'{loss:.4f}',
                  f'{loss_at_64:.4f}']]))
    print(f'\nOurs took {seconds / peer_seconds:.3f} times as long, its ten evaluations included; nanoGPT '
          'evaluated only afterwards. ' + ("It never came down to nanoGPT's loss." if passing is None else
                                           f"It passed nanoGPT's last loss after {passing:.1f} s.")
          + "\nThe losses are over all of the validation text, in windows of each model's own block size,\n"
          'and of 64 for both: longer windows alone lower a loss.\n')
    return dict(nanoGPT=dict(seconds=peer_seconds, steps=2000, val_loss=peer_loss),
                time_ratio=seconds / peer_seconds, seconds_to_pass=passing,
                ours=dict(seconds=seconds, steps=steps, val_loss=loss, loss_at_64=loss_at_64, log=rows))


# ------------------------------------------------------------------------------------------------------------
# what train.py does on a GPU

def measure_gpu(machine, seed, enough=240, loss=1.4697, **given):
    """
    Every scheme's training step with train.py's defaults, in one piece and compiled: seconds, the share of
    the GPU's peak, memory. Then the seconds that rope takes to a validation loss of 1.4697 on tinyshakespeare
    (what nanoGPT's page has for this model and data), in a run of as many steps as fit into `enough` seconds.

    enough      seconds after which nothing more is compiled; given: other settings of train.py's
    """
    declared = {**declared_settings(os.path.join(HERE, 'train.py')), **scheme_options()}
    start = settle({name: setting.value for name, setting in declared.items()}, given, machine)
    begun, results, rows = time.perf_counter(), {}, []
    tokens = start.settings['batch_size'] * start.settings['block_size']
    for name, compiled in [(name, compiled) for compiled in (False, True) for name in ours.SCHEMES]:
        if compiled and time.perf_counter() - begun > enough:
            rows.append([f'{name}, compiled', 'no time left', '-', '-', '-'])
            continue
        args = {**start.model_args, 'vocab_size': VOCABULARY, 'position': name}
        if machine.type == 'cuda':
            torch.cuda.reset_peak_memory_stats(machine)
        (seconds,) = step_times({name: args}, {**start.settings, 'compile': compiled},
                                start.settings['block_size'], machine).values()
        name, memory = name + ', compiled' * compiled, peak_memory(machine)
        model = ours.GPT(ours.GPTConfig(**args)).to(machine)
        mfu = utilisation(model, tokens, seconds, start.settings['dtype'])
        results[name] = dict(seconds=seconds, per_second=tokens / seconds, mfu=mfu, peak_mb=memory)
        rows.append([name, f'{1000 * seconds:,.2f}', f'{tokens / seconds:,.0f}', f'{mfu:.1%}' if mfu else '-',
                     f'{memory:,.0f}'])
    print(table(['a step of train.py', 'ms', 'tokens/s', 'MFU', 'peak MB'], rows) + '\n', flush=True)

    step = results.get('rope, compiled', results['rope'])['seconds']
    steps = max(min(start.settings['max_iters'], int(enough / step)), 20)
    flags = [f'--{key}={value}' for key, value in given.items()]
    log, _ = train_ours(steps, math.ceil(steps / 20), seed, f'--device={machine}', *flags)
    passing = time_of_passing(log, loss)
    print(f'rope, {steps:,} steps in {log[-1][0]:.0f} s: validation loss {log[-1][1]:.4f}; {loss} was '
          + ('never reached' if passing is None else f'reached after {passing:.1f} s') + '\n', flush=True)
    return dict(steps=results, loss=loss, seconds_to_loss=passing, log=log)


# ------------------------------------------------------------------------------------------------------------
# what is left behind

def describe_machine(machine, peer_folder):
    """Where, when and with what: for every part, since they can be measured anew one by one."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration), open('/proc/cpuinfo') as file:
        cpu = next(line.partition(':')[2].strip() for line in file if line.startswith('model name'))
    versions = dict(python=platform.python_version())
    for name in ('torch', 'numpy', 'transformers', 'x-transformers'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return dict(cpu=cpu, cores=os.cpu_count(), threads=torch.get_num_threads(), device=str(machine),
                gpu=torch.cuda.get_device_name(machine) if machine.type == 'cuda' else None, **versions,
                git_commit=git_commit(), peer_commit=git_commit(peer_folder) if peer_folder else None,
                date=datetime.datetime.now().isoformat(timespec='seconds'),
                command=' '.join(['python', os.path.basename(sys.argv[0]), *sys.argv[1:]]))


def read_results(path):
    """What bench.json holds from before, {part: numbers}; one line if it cannot be written or is not ours."""
    if os.path.isdir(os.path.abspath(path)):
        inside = os.path.join(path, 'bench.json')
        fail(f'out {path!r} is a directory; name a file in it, as in --out={inside}')
    need_folder(os.path.dirname(os.path.abspath(path)))
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding='utf-8') as file:
            results = json.load(file)
        if not isinstance(results, dict) or results.keys() - set(PARTS):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        fail(f'{path} holds something else than results of bench.py, or is damaged; '
             'remove it, or choose another --out')
    return results


def main():
    names = named(parts, PARTS, 'part')
    if dtype not in (None, 'float32', 'bfloat16'):
        fail(f'dtype must be bfloat16, float32 or None, not {dtype!r}')
    if 'race' in names and peer is None:
        fail('race needs an opponent: name a checkout of nanoGPT, as in --peer=../nanoGPT')
    results, machine = read_results(out), pick_device(device)
    nanogpt = None if peer is None else load_peer(peer)
    if 'gpu' in names and machine.type == 'cpu':
        fail('gpu measures a GPU, and PyTorch finds none here; choose other parts')
    if 'race' in names or 'gpu' in names:
        prepare_if_missing('tinyshakespeare')
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    if machine.type == 'cuda':
        torch.set_float32_matmul_precision('high')      # TF32, as train.py has it, and nanoGPT's

    variants = [(True, 'float32')] * compile
    if dtype == 'bfloat16':
        variants += [(False, dtype)] + [(True, dtype)] * compile
    few = min(repetitions, 3)
    measure = dict(
        step=lambda: measure_steps(STEPS, machine, repetitions, seed, 'nanoGPT' if nanogpt else 'none',
                                   variants, nanogpt=nanogpt, libraries=True),
        schemes=lambda: measure_steps(SCHEME_STEPS, machine, repetitions, seed, 'none'),
        sample=lambda: measure_sample(machine, few, seed, nanogpt),
        data=lambda: measure_data(machine, repetitions, seed),
        long=lambda: measure_long(machine, few, seed),
        race=lambda: measure_race(nanogpt, seed),
        gpu=lambda: measure_gpu(machine, seed))
    for name in names:
        where = describe_machine(CPU if name == 'race' else machine, peer)
        processor = where['gpu'] or where['cpu']
        print(f'## {name}: {processor}, {where["threads"]} threads, torch {where["torch"]}\n', flush=True)
        rounds = {'sample': few, 'long': few, 'race': 1, 'gpu': 1}.get(name, repetitions)
        results[name] = dict(machine=where, repetitions=rounds, results=measure[name]())
        content = json.dumps(results, indent=1)
        write_whole(out, lambda file: file.write(content.encode()))
    print(f'written to {out}')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))     # ends its children, too
    main()
