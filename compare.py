"""
Which position encoding, by how much, and how sure are we?

    python compare.py                                           # trains five schemes with three seeds each, then compares them
    python compare.py --schemes=none,rope,t5 --seeds=5 --block_size=256 --out_dir=out/block256      # any setting of train.py may follow
    python compare.py out/rope out/alibi                        # compares finished runs; trains nothing
    python compare.py out/rope --scalings=none,linear,ntk,dynamic,yarn      # RoPE beyond its trained length: scaling.md

Finished runs are kept and interrupted ones go on, so the same command may be given again. In out_dir it leaves table.md, which it also
prints, results.csv with a row for each run, and the pictures curves.png, length.png and position.png.
"""
import csv
import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from types import SimpleNamespace

from configurator import configure, declared_settings, fail

# ----------------------------------------------------------------------------------------------------------------------
# what to compare
schemes = 'learned,sinusoidal,shaw,rope,alibi'  # trained where no runs are named; 'all' takes all eight
seeds = 3                       # runs of each scheme
seed = 1337                     # the first run's seed; the others' follow it
out_dir = 'out/compare'         # where the runs are trained and the results written
jobs = 1                        # trainings side by side, each with its share of the CPU's cores
force = False                   # compare runs although their data, sizes or steps differ
# the length sweep
sweep_tokens = 65536            # tokens of the validation text that are scored at every length, the same ones
longest = 16                    # the longest windows, in trained lengths
stride: int = None              # score sliding windows too, each so many tokens after the one before
# RoPE's context extensions
scalings: str = None            # score the named RoPE runs at 1, 2, 4 and 8 times their length with each of these, and stop
# the machine
device = 'auto'                 # auto, cpu, cuda, cuda:0, mps
# ----------------------------------------------------------------------------------------------------------------------
if __name__ == '__main__':      # notebooks and tests import the functions below
    settings, given, folders = configure(globals(), __file__, arguments_are='runs', passed_on=declared_settings(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train.py')))

import numpy as np              # after configure(), so that --help and mistakes in flags answer at once
import torch
from tqdm import tqdm

from dataset import DATA, Dataset, data_folder
from model import GPT, GPTConfig, ROPE_SCALINGS, SCHEMES
from runs import autocast, load_checkpoint, make_model, need_folder, pick_device, token_losses, window_starts, write_whole

HERE = os.path.dirname(os.path.abspath(__file__))

# How each scheme is drawn, in every picture of this project. The colours are Okabe and Ito's (2008), which the colour-blind can tell
# apart; the dashes and marks tell the lines apart in black and white.
STYLES = {
    'learned': dict(color='#000000', linestyle='-', marker='o'),
    'sinusoidal': dict(color='#56B4E9', linestyle=(0, (5, 2)), marker='s'),
    'shaw': dict(color='#CC79A7', linestyle=(0, (6, 2, 1, 2)), marker='D'),
    'rope': dict(color='#D55E00', linestyle='-', marker='^'),
    'alibi': dict(color='#0072B2', linestyle=(0, (3, 1)), marker='v'),
    'none': dict(color='#888888', linestyle=(0, (1, 1)), marker='x'),
    't5': dict(color='#009E73', linestyle=(0, (8, 2)), marker='P'),
    'tupe': dict(color='#E69F00', linestyle=(0, (6, 2, 1, 2, 1, 2)), marker='*'),
}
OTHER_STYLE = dict(color='#6A3D9A', linestyle=(0, (2, 2)), marker='p')      # of schemes that readers add

# ----------------------------------------------------------------------------------------------------------------------
# statistics

# The 0.975 quantile of Student's t distribution with 1, 2, .. 20 degrees of freedom (NIST/SEMATECH e-Handbook, section 1.3.6.7.2)
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
               2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


def mean_and_error(values):
    """Mean, and its standard error: the standard deviation (n - 1) over sqrt(n); nan for a single value."""
    values = np.asarray(values, dtype=np.float64)
    return values.mean(), values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def paired_difference(losses, base_losses):
    """
    Both {seed: loss}. The mean over the seeds that both have of loss - base loss, and half the width of its 95% interval: t times the
    standard error, with n - 1 degrees of freedom (beyond 20 the t of 20, a shade too wide); nan for a single seed, (nan, nan) for none.
    """
    common = sorted(losses.keys() & base_losses.keys())
    if not common:
        return math.nan, math.nan
    mean, error = mean_and_error([losses[seed] - base_losses[seed] for seed in common])
    return mean, error * T_QUANTILES[min(len(common) - 1, len(T_QUANTILES)) - 1]


# ----------------------------------------------------------------------------------------------------------------------
# runs on the disk, and which of them can be compared

SCHEME_SETTINGS = ('position', 'sinusoidal_', 'shaw_', 'rope_', 'yarn_', 't5_')     # how the names of a scheme's settings begin
FREE_SETTINGS = ('dataset', 'out_dir', 'overwrite', 'log_interval', 'eval_only', 'wandb_log', 'wandb_project', 'wandb_run_name', 'device',
                 'compile', 'backend', 'deterministic')     # of no consequence for the loss; the data are compared by their contents
OF_ITS_OWN = ('seed', *SCHEME_SETTINGS)                     # what may differ between runs that are compared


def read_run(folder):
    """A run of train.py's, from its config.json and log.csv: settings, model_args, data, log. One line if there is none."""
    path, log = os.path.join(folder, 'config.json'), []
    try:
        with open(path, encoding='utf-8') as file:
            config = json.load(file)
        run = SimpleNamespace(folder=folder, settings=config['settings'], model_args=config['model_args'], data=config['data'], log=log)
        if type(run.settings['max_iters']) is not int:
            raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        fail(f'{folder} holds no run: it has no config.json; name the folder of a finished run')
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f'{path} cannot be read ({type(error).__name__}); train the run again')
    path = os.path.join(folder, 'log.csv')
    if os.path.exists(path):
        try:
            with open(path, encoding='utf-8', newline='') as file:
                for row in csv.DictReader(file):
                    log.append(SimpleNamespace(iteration=int(row['iter']), tokens=int(row['tokens']), seconds=float(row['seconds']),
                                               val_loss=float(row['val_loss'])))
        except (OSError, ValueError, KeyError, TypeError):
            fail(f'{path} is damaged; resume the run, which writes it again, or train it again')
    run.finished = bool(log) and log[-1].iteration >= run.settings['max_iters'] and os.path.exists(os.path.join(folder, 'last.pt'))
    return run


def differences(one, other, but=OF_ITS_OWN):
    """What keeps two runs from being compared, in words such as 'n_layer 4 against 6'; settings that begin as in `but` may differ."""
    found = []
    if one.data != other.data:
        names = one.settings['dataset'], other.settings['dataset']
        found.append('data {} against {}'.format(*names) if names[0] != names[1] else f'two versions of the data set {names[0]}')
    for key in one.settings:
        values = [run.settings.get(key) for run in (one, other)]
        if key == 'init_from':                              # a run that was interrupted and went on is as good as any
            values = ['scratch' if value == 'resume' else value for value in values]
        if key not in FREE_SETTINGS and not key.startswith(but) and values[0] != values[1]:
            found.append(f'{key} {values[0]} against {values[1]}')
    return found


def check_comparable(runs, force):
    """Ends the script with one line that names the first difference that matters, unless `force`."""
    for run in runs:
        if not run.finished:
            steps = run.log[-1].iteration if run.log else 0
            fail(f'{run.folder} is not finished: it stands at step {steps} of {run.settings["max_iters"]}, or lost its last.pt; '
                 f'train it to its end with `python train.py --out_dir={run.folder} --init_from=resume`')
        found = differences(runs[0], run)
        if found and not force:
            fail(f'{runs[0].folder} and {run.folder} cannot be compared: {", ".join(found)}; '
                 'name runs that differ only in their scheme and seed, or add --force')


def group_runs(runs):
    """
    The runs that differ in nothing but their seeds, together: a list of groups with position, label and runs, {seed: run}. A group is
    called after its scheme, or where two groups share a scheme after its first run's folder.
    """
    groups = []
    for run in runs:
        for group in groups:
            if not differences(group.first, run, but=('seed',)):
                break
        else:
            group = SimpleNamespace(first=run, position=run.settings['position'], runs={})
            groups.append(group)
        seed = run.settings['seed']
        if seed in group.runs:
            fail(f'{group.runs[seed].folder} and {run.folder} are the same run: scheme {group.position}, seed {seed}; name one of them')
        group.runs[seed] = run
    positions = [group.position for group in groups]
    for group in groups:
        folder = os.path.basename(os.path.normpath(group.first.folder))
        group.label = group.position if positions.count(group.position) == 1 else re.sub(r'-seed\d+$', '', folder)
    return groups


# ----------------------------------------------------------------------------------------------------------------------
# training what is missing

def train_command(scheme, seed, folder, flags):
    return [sys.executable, os.path.join(HERE, 'train.py'), *flags, f'--position={scheme}', f'--seed={seed}', f'--out_dir={folder}']


def last_line(path):
    """The last line of a text file that says something: a script's own account of why it ended."""
    with open(path, encoding='utf-8', errors='replace') as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1].removeprefix('train.py: ') if lines else 'it says nothing'


def settings_here(scheme, seed, flags):
    """
    What train.py would make of these flags, as a run that has not begun. Only train.py knows the sizes that fit this machine, so it is
    started in a temporary folder, and stopped as soon as it has written its config.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, config = os.path.join(folder, 'output.txt'), os.path.join(folder, 'config.json')
        with open(output, 'w') as file:
            process = subprocess.Popen(train_command(scheme, seed, folder, [*flags, '--wandb_log=False']), stdout=file, stderr=file)
        try:
            while process.poll() is None and not os.path.exists(config):
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        if not os.path.exists(config):
            fail(f'no run can be trained: {last_line(output)}')
        return read_run(folder)


def missing_runs(tasks, first):
    """
    Of the tasks, (scheme, seed, folder) each, those that are not finished, with the steps done. `first` is what train.py makes of the
    first task; a folder that holds a run with other settings ends the script with one line.
    """
    missing = []
    for scheme, seed, folder in tasks:
        steps = 0
        if os.path.exists(os.path.join(folder, 'config.json')):
            run = read_run(folder)
            wanted = SimpleNamespace(data=first.data, settings={**first.settings, 'position': scheme, 'seed': seed})
            found = differences(run, wanted, but=())
            if found:
                fail(f'{folder} holds another run: {", ".join(found)}; choose another --out_dir, or remove it')
            if run.finished:
                continue
            steps = run.log[-1].iteration if run.log else 0
        missing.append((scheme, seed, folder, steps))
    return missing


def train_missing(missing, flags, jobs, bar):
    """
    Trains the missing runs, `jobs` at a time, by train.py in processes of their own; what they print goes to output.txt in their folder.
    If one fails, or this script is stopped, the others are asked to save and stop.
    """
    environment = {**os.environ, **({'OMP_NUM_THREADS': str(max(1, os.cpu_count() // jobs))} if jobs > 1 else {})}
    waiting, running = list(missing), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                scheme, seed, folder, steps = waiting.pop(0)
                os.makedirs(folder, exist_ok=True)
                begun = any(os.path.exists(os.path.join(folder, name)) for name in ('last.pt', 'ckpt.pt'))
                command = train_command(scheme, seed, folder, flags) + (['--init_from=resume'] if begun else [])
                with open(os.path.join(folder, 'output.txt'), 'a') as file:
                    # a process group of its own: Ctrl-C reaches this script alone, which then asks its runs to stop, once
                    process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, process_group=0)
                running.append(SimpleNamespace(process=process, folder=folder, steps=steps))
            time.sleep(0.2)
            for job in list(running):
                ended = job.process.poll() is not None
                run = read_run(job.folder) if os.path.exists(os.path.join(job.folder, 'log.csv')) else None
                if run and run.log and run.log[-1].iteration > job.steps:
                    bar.update(run.log[-1].iteration - job.steps)
                    job.steps = run.log[-1].iteration
                if ended:
                    running.remove(job)
                    if job.process.returncode != 0:
                        fail(f'the run {job.folder} failed: {last_line(os.path.join(job.folder, "output.txt"))}')
                    say(bar, f'{job.folder}: validation loss {run.log[-1].val_loss:.4f} after {run.log[-1].seconds:.0f} s')
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()


# ----------------------------------------------------------------------------------------------------------------------
# what is measured of a run

def sweep_plan(block_size, n_tokens, sweep_tokens, multiples):
    """
    The windows' lengths, in tokens, and the part of a text of n_tokens that is scored at each of them: (lengths, begin, count). The
    tokens begin + 1 .. begin + count are predicted at every length; there are `begin` tokens before them, so that sliding windows can
    give all of them long context, and whole windows of every length fit into them.
    """
    lengths = [int(block_size * multiple) for multiple in multiples if block_size * multiple == int(block_size * multiple)]
    lengths = [length for length in lengths if length <= sweep_tokens and 2 * length < n_tokens]
    if block_size not in lengths:
        fail(f'windows of {block_size} tokens need more than {2 * block_size} tokens of validation text, and there are {n_tokens}; and a '
             f'sweep_tokens of at least {block_size}, which is {sweep_tokens}: use a larger data set, or raise sweep_tokens')
    begin = lengths[-1]
    return lengths, begin, min(sweep_tokens, n_tokens - 1 - begin) // lengths[-1] * lengths[-1]


def losses_at_length(model, tokens, length, begin, count, stride, device):
    """
    The mean loss on the part of `tokens` that sweep_plan() chose, in nats per token, read in windows of `length`: over all tokens, over
    those in the last quarter of their window, and, given a stride, over all tokens in sliding windows, where each is predicted from at
    least length - stride + 1 tokens. None for each if the model's table of positions ends before.
    """
    if model.config.position == 'learned' and length > model.config.block_size:
        return None, None, None
    losses = token_losses(model, tokens[begin:begin + count + 1], length, device, nullcontext())
    sliding = None
    if stride is not None:
        before = max(length - stride, 0)                    # the first window scores its last `stride` tokens, as all others do
        sliding = token_losses(model, tokens[begin - before:begin + count + 1], length, device, nullcontext(), stride)[before:].mean()
    return losses.mean(), losses.reshape(-1, length)[:, -max(length // 4, 1):].mean(), sliding


def answer_accuracy(model, tokenizer, examples, device):
    """The share of word_order's `examples`, (prompt, answer) with words in both, that the model answers rightly by its likeliest token."""
    by_length, right = {}, 0
    for prompt, answer in examples:
        by_length.setdefault(len(prompt), []).append((tokenizer.encode('\n' + ' '.join(prompt)), tokenizer.encode(' ' + answer)[0]))
    with torch.inference_mode():
        for pairs in by_length.values():
            for i in range(0, len(pairs), 250):
                prompts, answers = (torch.from_numpy(np.array(part).astype(np.int64)).to(device) for part in zip(*pairs[i:i + 250]))
                right += (model(prompts)[0][:, -1].argmax(dim=-1) == answers).sum().item()
    return right / len(examples)


def answers_by_clauses(model, data, device):
    """
    word_order's accuracies by the number of clauses in a sentence, {clauses: share}: on the validation sentences, whose words no training
    sentence has together, and on new ones up to four times as long. None where a learned table ends before the sentence does.
    """
    sys.path.append(os.path.join(DATA, 'word_order'))
    import sentences
    trained = len(data.meta['notes']['bag_of_words'])
    lines = [line.split() for line in data.tokenizer.decode(data.tokens('val')).split('\n') if line]
    examples = {}
    for words in lines:
        examples.setdefault((len(words) - 6) // 4, []).append((words[:-1], words[-1]))      # 4 words a clause, and 6 more
    for clauses in sorted({trained + 1, 2 * trained, 3 * trained, 4 * trained}):
        if clauses <= sentences.MOST_CLAUSES:
            examples[clauses] = sentences.examples(1000, clauses, seed=clauses)
    ends = model.config.block_size if model.config.position == 'learned' else math.inf
    return {clauses: answer_accuracy(model, data.tokenizer, examples[clauses], device)
            if 4 * clauses + 6 <= ends else None for clauses in sorted(examples)}           # '\n' and the prompt


def code_version():
    """A hash of the code that decides what an evaluation finds."""
    version = hashlib.sha256(torch.__version__.encode())
    for name in ('model.py', 'runs.py', 'dataset.py', 'compare.py', 'data/word_order/sentences.py'):
        if os.path.exists(os.path.join(HERE, name)):
            with open(os.path.join(HERE, name), 'rb') as file:
                version.update(file.read())
    return version.hexdigest()


def evaluate(run, block_size, sweep, stride, device, cache_folder, code):
    """
    What the tables and pictures need of a run, from its last weights, in float32, by sweep_plan()'s `sweep`: a dictionary with

        val_loss        mean loss over the whole validation text, in windows of block_size, as in the last row of log.csv
        curve_end       the same over the windows that the run was scored on during training
        by_window       mean loss in each whole window
        by_position     mean loss at each position in these windows
        by_length       {length: what losses_at_length() says}
        answers         word_order's accuracies

    It takes a minute or so, so it is kept in cache_folder, under a name that changes with the weights, the data, the sweep and the code,
    a code_version().
    """
    path = os.path.join(run.folder, 'last.pt')
    name = hashlib.sha256(json.dumps([code, run.data, block_size, sweep, stride, device.type]).encode())
    with open(path, 'rb') as file:
        name.update(hashlib.file_digest(file, 'sha256').digest())
    cached = os.path.join(cache_folder, name.hexdigest()[:32] + '.json')
    if os.path.exists(cached):
        with open(cached, encoding='utf-8') as file:
            found = json.load(file)
        for key in ('by_length', 'answers'):                # JSON's keys are text
            found[key] = {int(number): value for number, value in found[key].items()}
        return found

    model = make_model(load_checkpoint(path), path).to(device).eval()
    data = open_data(run)
    tokens = data.tokens('val')
    losses = token_losses(model, tokens, block_size, device, nullcontext())
    windows = losses[:len(losses) // block_size * block_size].reshape(-1, block_size)
    scored = window_starts(len(tokens), block_size, run.settings['eval_windows']) // block_size
    found = dict(
        val_loss=float(losses.mean(dtype=np.float64)), curve_end=float(windows[scored].mean()),
        by_window=windows.mean(axis=1).tolist(), by_position=windows.mean(axis=0).tolist(),
        by_length={length: [value if value is None else float(value) for value in
                            losses_at_length(model, tokens, length, *sweep[1:], stride, device)] for length in sweep[0]},
        answers=answers_by_clauses(model, data, device) if run.settings['dataset'] == 'word_order' else {})
    write_whole(cached, lambda file: file.write(json.dumps(found).encode()))
    return found


def open_data(run):
    """The data set that a run was trained on. One line if it has changed since."""
    data = Dataset(data_folder(run.settings['dataset']))
    if data.meta['sha256'] != run.data:
        fail(f'the data set {run.settings["dataset"]} is not what {run.folder} was trained on; prepare it again as it was then')
    return data


def step_times(models, settings, block_size, device):
    """
    Seconds that a training step takes, {name: seconds}, for `models`, {name: model_args}: forward, backward, clipping and the optimizer,
    on one micro-batch. The models take turns, for 20 seconds or 40 rounds but at least 8, and each one's fastest step counts: whatever
    else the machine does can only slow a step.
    """
    steps = {}
    for name, args in models.items():
        try:
            model = raw_model = GPT(GPTConfig(**args)).to(device)
        except ValueError as error:
            fail(f'no run can be trained: {error}')
        optimizers = raw_model.configure_optimizers(settings['weight_decay'], settings['learning_rate'], (settings['beta1'],
                     settings['beta2']), device.type, settings['optimizer'], settings['muon_learning_rate'])
        tokens = torch.randint(args['vocab_size'], (settings['batch_size'], block_size), device=device)
        if settings['compile']:
            try:
                model = torch.compile(raw_model)
                with autocast(device, settings['dtype']):
                    model(tokens, tokens)[1].backward()
            except Exception:                               # train.py goes on without it, too
                model = raw_model

        def step(model=model, raw_model=raw_model, optimizers=optimizers, tokens=tokens):
            with autocast(device, settings['dtype']):
                loss = model(tokens, tokens)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), settings['grad_clip'] or math.inf)
            for one in optimizers:
                one.step()
                one.zero_grad(set_to_none=True)
            return loss.item()                              # waits for the GPU
        steps[name] = step

    fastest = {name: math.inf for name in steps}
    for step in list(steps.values()) * 2:                   # to warm up
        step()
    started, rounds = time.perf_counter(), 0
    while rounds < 8 or rounds < 40 and time.perf_counter() - started < 20:
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            fastest[name] = min(fastest[name], time.perf_counter() - begun)
        rounds += 1
    return fastest


# ----------------------------------------------------------------------------------------------------------------------
# pictures

def spread(heights, gap):
    """The heights, moved as little as need be to stand at least `gap` apart, in their order."""
    order = np.argsort(heights, kind='stable')
    moved = np.array(heights, dtype=np.float64)[order]
    for _ in range(1000):
        for low in range(len(moved) - 1):
            push = max(gap - (moved[low + 1] - moved[low]), 0) / 2
            moved[low:low + 2] += (-push, push)
    result = np.empty_like(moved)
    result[order] = moved
    return result


def draw_panel(axes, curves, title, marks=True):
    """
    Curves, (label, position, x, values) with values (seeds, len(x)): the mean as a line, in the scheme's style, a band from the lowest
    seed to the highest, and the label at the line's end.
    """
    ends = []
    for label, position, x, values in curves:
        style, mean = STYLES.get(position, OTHER_STYLE), np.mean(values, axis=0)
        axes.plot(x, mean, **{**style, 'marker': style['marker'] if marks else ''}, linewidth=1.6, markersize=4.5,
                  markevery=max(1, len(x) // 10))
        axes.fill_between(x, np.min(values, axis=0), np.max(values, axis=0), color=style['color'], alpha=0.2, linewidth=0)
        ends.append((label, style['color'], x[-1], mean[-1]))
    axes.set_title(title, fontsize=10, loc='left')
    axes.grid(color='0.9')
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    return ends


def label_ends(axes, ends):
    """
    Labels, (label, colour, x, y), in a column right of the axes, apart from one another, each with a thin line from its curve's end. A
    curve that ends early is labelled above its end.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((x, y)) for _, _, x, y in ends]
    early = max(x for x, _ in points) - 0.3
    for (label, colour, _, _), point in zip(ends, points):
        if point[0] < early:
            axes.annotate(label, xy=point, xytext=(0, 6), xycoords='axes fraction', textcoords='offset points', color=colour, fontsize=9,
                          ha='center', bbox=dict(facecolor='white', edgecolor='none', alpha=0.8, pad=0.5))
    ends, points = zip(*[(end, point) for end, point in zip(ends, points) if point[0] >= early])
    gap = 11 / 72 / (axes.get_position().height * axes.figure.get_figheight())      # 11 points, in heights of the axes
    for (label, colour, _, _), point, height in zip(ends, points, spread([y for _, y in points], gap)):
        axes.annotate(label, xy=point, xytext=(1.05, height), xycoords='axes fraction', textcoords='axes fraction', color=colour,
                      fontsize=9, va='center', annotation_clip=False,
                      arrowprops=dict(arrowstyle='-', color=colour, linewidth=0.6, shrinkA=1, shrinkB=2, relpos=(0, 0.5)))


def new_figure(panels):
    """A figure with so many panels side by side, and room for labels right of each."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5.2 * panels, 4))
    axes = figure.subplots(1, panels, squeeze=False)[0]
    figure.subplots_adjust(left=0.75 / (5.2 * panels), right=1 - 1.05 / (5.2 * panels), bottom=0.13, top=0.91, wspace=0.5)
    return figure, axes


def write_figure(figure, path):
    picture = io.BytesIO()
    figure.savefig(picture, format='png', dpi=150)
    write_whole(path, lambda file: file.write(picture.getvalue()))


def draw_curves(groups, path):
    """Validation loss over tokens and over seconds, on the windows that were scored during training, from the second evaluation on."""
    from matplotlib.ticker import MaxNLocator
    figure, panels = new_figure(2)
    over_tokens, over_seconds = [], []
    for group in groups:
        rows = []                                           # per run {iteration: (tokens, seconds, loss)}
        for run in group.runs.values():
            # the last row's loss is over the whole text, the others' over some windows: take it over those windows here
            losses = [row.val_loss for row in run.log[:-1]] + [run.result['curve_end']]
            rows.append({row.iteration: (row.tokens, row.seconds, loss) for row, loss in zip(run.log, losses) if row.iteration > 0})
        common = sorted(set.intersection(*map(set, rows)))
        tokens, seconds, losses = np.moveaxis(np.array([[row[iteration] for iteration in common] for row in rows]), 2, 0)
        over_tokens.append((group.label, group.position, tokens.mean(axis=0), losses))
        over_seconds.append((group.label, group.position, seconds.mean(axis=0), losses))
    for axes, curves, what in ((panels[0], over_tokens, 'tokens read in training'), (panels[1], over_seconds, 'seconds of training')):
        ends = draw_panel(axes, curves, f'validation loss over {what}')
        axes.set(xlabel=what, ylabel='loss (nats per token)')
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter('{x:,.0f}')
        label_ends(axes, ends)
    write_figure(figure, path)


def draw_lengths(groups, block_size, path):
    """Loss against the evaluated length: over all tokens, over the last quarter of each window, and with a stride in sliding windows."""
    measures = ['all tokens of each window', 'the last quarter of each window', 'sliding windows']
    n_measures = 3 if any(run.result['by_length'][block_size][2] is not None for group in groups for run in group.runs.values()) else 2
    figure, panels = new_figure(n_measures)
    for number, axes in enumerate(panels):
        curves = []
        for group in groups:
            results = [run.result['by_length'] for run in group.runs.values()]
            lengths = [length for length in results[0] if all(result[length][number] is not None for result in results)]
            curves.append((group.label, group.position, np.array(lengths),
                           np.array([[result[length][number] for length in lengths] for result in results])))
        ends = draw_panel(axes, curves, measures[number])
        lengths = list(results[0])
        axes.set_xscale('log', base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
        axes.set(xlabel='length of the windows read (tokens)', ylabel='loss (nats per token)')
        axes.axvline(block_size, color='0.4', linewidth=1, linestyle=':', zorder=0.5)
        axes.text(block_size, 1, ' trained length', transform=axes.get_xaxis_transform(), color='0.4', fontsize=8, va='top')
        label_ends(axes, [(label if x == lengths[-1] else f'{label} ends', colour, x, y) for label, colour, x, y in ends])
    write_figure(figure, path)


def draw_positions(groups, base, path):
    """Loss at each position in the window, as it is and less the base's: where does context help? Averaged over bins that widen."""
    figure, panels = new_figure(2)
    n_positions = len(base.first.result['by_position'])
    edges = np.unique(np.geomspace(1, n_positions + 1, 25).round().astype(int))         # 1, 2, 3, .. then wider and wider
    middles = np.sqrt(edges[:-1] * (edges[1:] - 1))

    def smoothed(run):
        return [np.mean(run.result['by_position'][low - 1:high - 1]) for low, high in zip(edges[:-1], edges[1:])]
    losses, against_base = [], []
    for group in groups:
        losses.append((group.label, group.position, middles, np.array([smoothed(run) for run in group.runs.values()])))
        common = sorted(group.runs.keys() & base.runs.keys())
        if common:
            against_base.append((group.label, group.position, middles, np.array(
                [np.subtract(smoothed(group.runs[seed]), smoothed(base.runs[seed])) for seed in common])))
    for axes, curves, title in ((panels[0], losses, 'loss by tokens read so far in the window'),
                                (panels[1], against_base, f'the same, less the loss of {base.label}')):
        ends = draw_panel(axes, curves, title)
        axes.set_xscale('log', base=2)
        ticks = [2 ** power for power in range(int(math.log2(n_positions)) + 1)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set(xlabel='tokens read so far', ylabel='loss (nats per token)')
        label_ends(axes, ends)
    write_figure(figure, path)


# ----------------------------------------------------------------------------------------------------------------------
# tables

def table(header, rows):
    """A Markdown table, padded so that it also reads well as text. The first column is aligned to the left, the others to the right."""
    rows = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ['| ' + ' | '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + ' |' for row in rows]
    rule = '|' + '-' * (widths[0] + 2) + '|' + ''.join('-' * (width + 1) + ':|' for width in widths[1:])
    return '\n'.join([lines[0], rule, *lines[1:]])


def number(value, form='.4f'):
    """A number for a table; what is not known is a dash."""
    return '-' if value is None or math.isnan(value) else format(value, form)


def mean_at(group, length, measure=0):
    """A group's mean loss at a length, for a table; or where its table of positions ends."""
    values = [run.result['by_length'][length][measure] for run in group.runs.values()]
    return f'table ends at {group.first.model_args["block_size"]}' if None in values else f'{np.mean(values):.4f}'


def window_spread(group, base):
    """The standard deviation over windows of the loss less the base's, both averaged over their common seeds; nan if there is none."""
    common = sorted(group.runs.keys() & base.runs.keys())
    windows = [[side.runs[seed].result['by_window'] for seed in common] for side in (group, base)]
    if not common or len(windows[0][0]) != len(windows[1][0]) or len(windows[0][0]) < 2:
        return math.nan
    return (np.mean(windows[0], axis=0) - np.mean(windows[1], axis=0)).std(ddof=1)


def write_table(groups, base, block_size, sweep, stride, seconds):
    """table.md as text: the comparison, the length sweep, word_order's answers, and how each was measured."""
    lengths, _, count = sweep
    settings = base.first.settings
    shown = [length for length in (block_size, 2 * block_size, 4 * block_size, 8 * block_size) if length in lengths]
    rows = []
    for group in groups:
        losses = {seed: run.result['val_loss'] for seed, run in group.runs.items()}
        mean, error = mean_and_error(list(losses.values()))
        difference, half = paired_difference(losses, {seed: run.result['val_loss'] for seed, run in base.runs.items()})
        rows.append([
            group.label, f'{group.own_parameters:,}', number(mean) + ('' if math.isnan(error) else f' ± {error:.4f}'),
            'base' if group is base else number(difference, '+.4f')
            + ('' if math.isnan(half) else f' ({difference - half:+.4f} to {difference + half:+.4f})'),
            '-' if group is base else number(window_spread(group, base), '.3f'),
            f'{seconds[group.label] / seconds["none"]:.2f}', *(mean_at(group, length) for length in shown)])
    header = ['scheme', 'own parameters', 'validation loss', f'difference to {base.label}', 'over windows', 'step time',
              *(f'at {length // block_size}x = {length}' for length in shown)]
    n_seeds = sorted({len(group.runs) for group in groups})
    sizes = ', '.join(f'{key} {settings[key]}' for key in
                      ('n_layer', 'n_head', 'n_embd', 'block_size', 'batch_size', 'max_iters', 'optimizer'))
    parts = [
        f'# Position encodings on {settings["dataset"]}',
        f'{sizes}; {" or ".join(counted(n, "seed") for n in n_seeds)} each. '
        'Losses in nats per token; lower is better.',
        table(header, rows),
        f'Validation loss: the whole validation text in windows of {block_size}, the weights after the last step, in float32; mean over '
        f'seeds ± its standard error. Difference to {base.label}: runs with one seed share batches, initial weights and windows, so they '
        'are subtracted seed by seed; mean, and in brackets the 95% t interval over seeds. Over windows: the standard deviation of '
        f'that difference from one window of {block_size} to the next. Step time: a training step in units of one of the scheme none, the '
        'fastest of many, the schemes taking turns in one process; the only column that two runs of one command do not share. At 1x, 2x, '
        f'..: the loss in windows of so many tokens, over {count:,} tokens of the validation text, the same ones at every length.',
        '## Loss by the length that is read']
    texts = [f'The same {count:,} tokens at every length, in windows side by side; mean over seeds. A window\'s first tokens have little '
             'context, and short windows have more of them: so much of what a longer window gains is gained by fewer early tokens.',
             'The last quarter of each window alone: every token has at least three quarters of the length as context. It is another '
             'quarter of the text at each length: hold the schemes of one column beside one another, not the columns of one scheme.',
             f'Sliding windows, each {stride} tokens after the one before: every token is predicted from more than length - {stride} '
             'tokens, and the same tokens are scored at every length. Windows up to that length stand side by side.']
    for measure, text in enumerate(texts[:2 if stride is None else 3]):
        parts += [text, table(['scheme', *map(str, lengths)], [[group.label, *(mean_at(group, length, measure) for length in lengths)]
                                                              for group in groups])]
    answered = [group for group in groups if group.first.result['answers']]
    if answered:
        clauses = list(answered[0].first.result['answers'])
        rows = []
        for group in answered:
            shares = [[run.result['answers'][n] for run in group.runs.values()] for n in clauses]
            rows.append([group.label, *('table ends' if None in share else f'{np.mean(share):.3f}' for share in shares)])
        rows.append(['bag of words, at best', *(f'{1 / (2 * n):.3f}' for n in clauses)])
        parts += ['## word_order: share of right answers by clauses in the sentence', table(['scheme', *map(str, clauses)], rows),
                  f'Training sentences have 1 to {answered[0].trained_clauses} clauses. Up to there: validation sentences, whose words no '
                  'training sentence has together; above: 1,000 new ones each. Every question is asked alone, after a line break; the '
                  'answer is the likeliest token. Mean over seeds. A bag of words cannot tell the subject from the object, nor one '
                  'clause from the next: of 2n nouns it hits the right one once in 2n times.']
    return '\n\n'.join(parts) + '\n'


def write_results(groups, seconds, path):
    """results.csv: a row for each run, with everything that the table averages."""
    measures = ['', '_last_quarter', '_sliding']
    lengths, clauses = (list(groups[0].first.result[key]) for key in ('by_length', 'answers'))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(['run', 'scheme', 'seed', 'parameters', 'own_parameters', 'steps', 'tokens', 'seconds', 'val_loss', 'step_time_to_none',
                     *(f'loss_at_{length}{measure}' for measure in measures for length in lengths),
                     *(f'accuracy_{n}_clauses' for n in clauses)])
    for group in groups:
        for seed, run in sorted(group.runs.items()):
            result, last = run.result, run.log[-1]
            writer.writerow([run.folder, group.label, seed, group.parameters, group.own_parameters, last.iteration, last.tokens,
                             last.seconds, result['val_loss'], round(seconds[group.label] / seconds['none'], 3),
                             *(result['by_length'][length][i] for i in range(len(measures)) for length in lengths),
                             *(result['answers'].get(n) for n in clauses)])
    write_whole(path, lambda file: file.write(text.getvalue().encode()))


# ----------------------------------------------------------------------------------------------------------------------
# RoPE beyond its trained length

def scaling_table(runs, scalings, sweep_tokens, stride, device):
    """
    scaling.md as text: RoPE runs at 1, 2, 4 and 8 times their trained length L. Runs trained from scratch are scored with each of the
    scalings switched on, factor = length / L, original length = L; runs that were trained on from others, as they are.
    """
    from_scratch = [run for run in runs if run.settings['init_from'] in ('scratch', 'resume') and run.model_args['rope_scaling'] == 'none']
    trained_on = [run for run in runs if run not in from_scratch]
    L = min(run.model_args['rope_original_length'] or run.model_args['block_size'] for run in runs)
    tokens = open_data(runs[0]).tokens('val')
    lengths, begin, count = sweep_plan(L, len(tokens), sweep_tokens, (1, 2, 4, 8))
    rows = []                                               # (name, one list of triples for each length, a triple for each run)
    bar = tqdm(total=(len(scalings) * len(from_scratch) + len(trained_on)) * len(lengths), unit='evaluation',
               disable=not sys.stderr.isatty())

    def score(run, length, **changes):
        path = os.path.join(run.folder, 'last.pt')
        model = make_model(load_checkpoint(path), path, **changes).to(device)
        bar.update()
        return losses_at_length(model, tokens, length, begin, count, stride, device)
    for scaling in scalings if from_scratch else ():
        rows.append((scaling, [[score(run, length, rope_scaling=scaling, rope_factor=1.0 if scaling == 'none' else length / L,
                                      rope_original_length=L) for run in from_scratch] for length in lengths]))
    for run in trained_on:
        args = run.model_args
        trained = f'{args["rope_scaling"]}, factor {args["rope_factor"]:g}, {run.settings["max_iters"]} steps at {args["block_size"]}'
        rows.append((f'{run.folder} ({trained})', [[score(run, length)] for length in lengths]))
    bar.close()

    parts = [f'# RoPE beyond its trained length, L = {L}, on {runs[0].settings["dataset"]}',
             f'Loss in nats per token over {count:,} tokens of the validation text, the same ones in each column. '
             + (f'Zero-shot, mean over {counted(len(from_scratch), "run")} ({", ".join(run.folder for run in from_scratch)}): '
                'the scaling is switched on at evaluation, with factor = length / L and original length L.' if from_scratch else '')
             + (' Rows that name a folder: runs that were trained on, scored as they are.' if trained_on else '')]
    titles = ['All tokens, windows side by side', 'The last quarter of each window', f'Sliding windows, stride {stride}']
    for measure, title in enumerate(titles[:2 if stride is None else 3]):
        cells = [[name, *(f'{np.mean([one[measure] for one in cell]):.4f}' for cell in losses)] for name, losses in rows]
        parts += [f'## {title}', table(['scaling', *(f'{length // L}L = {length}' for length in lengths)], cells)]
    if from_scratch and 'dynamic' in scalings:
        parts.append('A window is read in one pass, so dynamic takes the base for the whole window: '
                     'base (factor n / L - (factor - 1))^(d / (d - 2)) at n tokens. With factor 1 instead that is the row ntk exactly.')
    return '\n\n'.join(parts) + '\n'


# ----------------------------------------------------------------------------------------------------------------------

def say(bar, text):
    """Prints above the progress bar."""
    bar.write(text, file=sys.stdout)
    sys.stdout.flush()


def counted(number, noun):
    """'1 run', '1,000 runs'."""
    return f'{number:,} {noun}{"s"[:number != 1]}'


def duration(seconds):
    return f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} minutes' if seconds < 6000 else f'{seconds / 3600:.1f} hours'


def named(text, choices, what):
    """The names in a comma-separated list, each of which must be one of the choices."""
    names = [name.strip() for name in text.split(',')]
    for name in names:
        if name not in choices:
            fail(f'{what} {name!r} is not one of {", ".join(choices)}; write --{what}s={",".join(list(choices)[:2])}')
        if names.count(name) > 1:
            fail(f'--{what}s names {name} twice; name each once')
    return names


def check_flags():
    """One line for settings that make no sense, alone or together."""
    for name, (least, most) in dict(seeds=(1, 1000), seed=(0, 2 ** 60), jobs=(1, 1000), sweep_tokens=(1, 10 ** 9), longest=(1, 10 ** 6),
                                    stride=(1, 10 ** 9)).items():
        if settings[name] is not None and not least <= settings[name] <= most:
            fail(f'{name} must be from {least} to {most}, not {settings[name]}')
    need_folder(out_dir)
    for name in ('position', 'init_from', 'overwrite', 'eval_only', 'wandb_run_name'):
        if name in given:
            fail(f'--{name} is for train.py alone; ' + ('name the schemes with --schemes' if name == 'position' else
                                                        'compare.py trains from scratch what is missing, and resumes what is not finished'))
    passed_on = [name for name in given if name not in settings]
    if folders and passed_on:
        fail(f'--{passed_on[0]} is for training, and runs that are named are compared as they are; leave it out'
             + (', or use --scalings' if passed_on[0].startswith('rope_') else ''))
    if scalings is not None and not folders:
        fail('--scalings scores RoPE runs: name one or more, as in: python compare.py out/rope --scalings=none,yarn')


def score_scalings(machine):
    """What --scalings asks for: scaling.md, printed too."""
    names, runs = named(scalings, ROPE_SCALINGS, 'scaling'), [read_run(folder) for folder in folders]
    for run in runs:
        if run.settings['position'] != 'rope':
            fail(f'--scalings is for RoPE runs, and {run.folder} has position {run.settings["position"]}; name RoPE runs')
        if run.data != runs[0].data:
            fail(f'{runs[0].folder} and {run.folder} were trained on different data; name runs of one data set')
        check_comparable([run], force)                      # is it finished?
    text = scaling_table(runs, names, sweep_tokens, stride, machine)
    os.makedirs(out_dir, exist_ok=True)
    write_whole(os.path.join(out_dir, 'scaling.md'), lambda file: file.write(text.encode()))
    print(text)


def main():
    check_flags()
    machine, code = pick_device(device), code_version()
    if scalings is not None:
        return score_scalings(machine)

    # What is there, and what is missing. `first` stands for all runs: they have its data, sizes and steps.
    if folders:
        runs = [read_run(folder) for folder in folders]
        check_comparable(runs, force)
        first, tasks, missing, flags = runs[0], [], [], []
        models = {group.label: group.first.model_args for group in group_runs(runs)}
    else:
        names = list(SCHEMES) if schemes == 'all' else named(schemes, SCHEMES, 'scheme')
        flags = [f'--{name}={value}' for name, value in given.items() if name not in settings or name == 'device']
        tasks = [(name, seed + i, os.path.join(out_dir, f'{name}-seed{seed + i}')) for i in range(seeds) for name in names]
        first = settings_here(names[0], seed, flags)
        runs, missing = [first], missing_runs(tasks, first)
        models = {name: {**first.model_args, 'position': name} for name in names}
        if len(missing) < len(tasks):
            print(f'{len(tasks) - len(missing)} of {len(tasks)} runs are finished already')
    models.setdefault('none', {**first.model_args, 'position': 'none', 'rope_scaling': 'none', 'rope_factor': 1.0})
    block_size = min(run.model_args['block_size'] for run in runs)          # they differ only if forced to be compared
    validation_tokens = min(len(open_data(run).tokens('val')) for run in runs)
    multiples = [1 / 4, 1 / 2] + [2 ** i for i in range(int(math.log2(longest)) + 1)]
    sweep = sweep_plan(block_size, validation_tokens, sweep_tokens, multiples)

    # How long that will take. The work is counted in training steps; reading a token forward alone costs a third of training on it.
    seconds = step_times(models, first.settings, block_size, machine)
    micro_batches, max_iters = first.settings['gradient_accumulation_steps'], first.settings['max_iters']
    read = validation_tokens + sum(sweep[2] * (1 + (max(length / stride, 1) if stride else 0)) for length in sweep[0])
    evaluation_steps = 1 + int(read / (3 * micro_batches * first.settings['batch_size'] * block_size))
    n_runs = len(tasks or runs)
    training_time = sum((max_iters - steps) * micro_batches * seconds[name] for name, _, _, steps in missing)
    evaluation_time = n_runs * evaluation_steps * micro_batches * np.mean(list(seconds.values()))
    to_train = f'{counted(len(missing), "run")} of {counted(max_iters, "step")} to train: about {duration(training_time)}; then '
    print((to_train if missing else '') + f'{counted(n_runs, "run")} to evaluate: about {duration(evaluation_time)}', flush=True)
    bar = tqdm(total=sum(max_iters - steps for *_, steps in missing) + n_runs * evaluation_steps, unit='step',
               disable=not sys.stderr.isatty(), dynamic_ncols=True, smoothing=0.05)

    train_missing(missing, flags, jobs, bar)
    if tasks:
        runs = [read_run(folder) for _, _, folder in tasks]
        check_comparable(runs, force=False)
    groups = group_runs(runs)
    cache_folder = os.path.join(out_dir, 'evaluations')
    os.makedirs(cache_folder, exist_ok=True)
    for group in groups:
        model = GPT(GPTConfig(**group.first.model_args))
        group.parameters, group.own_parameters = model.get_num_params(non_embedding=False), model.get_num_position_params()
        group.trained_clauses = len(open_data(group.first).meta.get('notes', {}).get('bag_of_words', ()))
        for run in group.runs.values():
            bar.set_postfix_str(f'evaluating {run.folder}')
            run.result = evaluate(run, block_size, sweep, stride, machine, cache_folder, code)
            bar.update(evaluation_steps)
    bar.close()

    base = next((group for group in groups if group.label == 'learned'), groups[0])
    groups.sort(key=lambda group: np.mean([run.result['val_loss'] for run in group.runs.values()]))
    text = write_table(groups, base, block_size, sweep, stride, seconds)
    write_whole(os.path.join(out_dir, 'table.md'), lambda file: file.write(text.encode()))
    write_results(groups, seconds, os.path.join(out_dir, 'results.csv'))
    try:
        draw_curves(groups, os.path.join(out_dir, 'curves.png'))
        draw_lengths(groups, block_size, os.path.join(out_dir, 'length.png'))
        draw_positions(groups, base, os.path.join(out_dir, 'position.png'))
    except ImportError:
        print('no pictures are drawn: matplotlib is not installed')
    print(text)
    print(f'written to {out_dir}')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        main()
    except KeyboardInterrupt:
        print('\nstopped; the same command goes on', file=sys.stderr)
        sys.exit(130)
