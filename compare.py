"""
Which position encoding, by how much, and how sure are we?

    python compare.py                               # trains five schemes, three seeds each; compares them
    python compare.py --schemes=none,rope,t5 --seeds=5 --block_size=256 --out_dir=out/block256
    python compare.py out/rope out/alibi            # compares finished runs; trains nothing
    python compare.py out/rope --scalings=none,linear,ntk,dynamic,yarn      # RoPE beyond its trained length

The first two take any setting of train.py too. Finished runs are kept and interrupted ones go on, so the same
command may be given again. In out_dir it leaves table.md, which it also prints, results.csv with a row for
each run, and the pictures curves.png, length.png and position.png; with --scalings it leaves scaling.md.
"""
import functools
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

from configurator import configure, count, fail, read_config, training_settings


# ------------------------------------------------------------------------------------------------------------
# what to compare
schemes = 'learned,sinusoidal,shaw,rope,alibi'  # trained where no runs are named; 'all' takes all eight
as_published = False            # train without config/NAME.py, which holds what suits a scheme best
seeds: count = 3                # runs of each scheme
seed = 1337                     # the first run's seed; the others' follow it
out_dir = 'out/compare'         # where the runs are trained and the results written
jobs: count = 1                 # trainings side by side, each with its share of the CPU's cores
retrain = False                 # train runs anew whose scheme's code has changed since
keep = False                    # keep such runs; the table says so
force = False                   # compare runs although their data, sizes or steps differ; the table says so
# the length sweep
sweep_tokens: count = 16384     # tokens of the validation text that are scored at every length, the same ones
longest: count = 8              # the longest windows, in trained lengths
stride: count = None            # tokens from one sliding window to the next; None: half the trained length
# RoPE's context extensions
scalings: str = None            # score the named RoPE runs at up to 8 times their length with each, and stop
# the machine
device = 'auto'                 # auto, cpu, cuda, cuda:0, mps
# ------------------------------------------------------------------------------------------------------------
if __name__ == '__main__':      # tests import the functions below
    settings, given, folders = configure(globals(), __file__, arguments_are='runs',
                                         passed_on=training_settings())

import numpy as np              # after configure(), so that --help and mistakes in flags answer at once
from tqdm import tqdm

import plots
from dataset import Dataset, make_folder, prepare_if_missing, write_whole
from machine import END_WITH_STDIN, lock, pick_device
from measure import (code_version, evaluate, fingerprint, load_model, losses_at_length, step_times,
                     sweep_plan)
from model import GPT, GPTConfig, ROPE_SCALINGS, SCHEMES
from runs import check_comparable, differences, group_runs, need_folder, open_data, read_log, read_run
from settle import settle
from tables import comparison, counted, duration, last_line, named, results_csv, scaling_csv, scaling_report

HERE = os.path.dirname(os.path.abspath(__file__))

# ------------------------------------------------------------------------------------------------------------
# which runs, and training what is missing

@functools.cache
def prepared(dataset):
    return Dataset(prepare_if_missing(dataset))


def config_file(scheme):
    return os.path.join(HERE, 'config', f'{scheme}.py')


def planned_run(scheme, seed, folder, asked, machine, by_config=True):
    """
    What train.py will make of a scheme, a seed and what else is asked of it, {setting: value}, which comes
    before what the scheme's config file says: a run as read_run() gives one, before its first step.
    """
    if by_config and os.path.exists(config_file(scheme)):
        asked = {**read_config(config_file(scheme), training_settings()), **asked}
    asked = {**asked, 'position': scheme, 'seed': seed, 'out_dir': folder}
    defaults = {name: default.value for name, default in training_settings().items()}
    settled = settle({**defaults, **asked}, asked, machine)
    data = prepared(settled.settings['dataset'])
    return SimpleNamespace(folder=folder, asked=asked, anew=False, settings=settled.settings,
                           data=data.meta['sha256'],
                           model_args={**settled.model_args, 'vocab_size': data.vocab_size})


def steps_done(planned, retrain=False, keep=False):
    """
    How many steps of a planned run are done; None if it is finished. One line if another run is there, or one
    that other code has trained and that is neither to be kept nor to be trained anew.
    """
    if not os.path.exists(os.path.join(planned.folder, 'config.json')):
        return 0
    run = read_run(planned.folder)
    found = differences(run, planned, but=())
    if found:
        fail(f'{planned.folder} holds another run: {", ".join(found)}; '
             'choose another --out_dir, or remove it')
    changed = other_code(run)
    if changed and retrain:
        print(f'{run.folder} is trained anew: {changed}')
        planned.anew = True
        return 0
    if changed and not keep:
        fail(f'{run.folder} is of other code: {changed}; add --retrain, or --keep, which the table will say')
    return None if run.finished else run.log[-1].iteration if run.log else 0


def other_code(run):
    """How this code differs from what has trained a run, in words; '' if it does not, as far as is known."""
    now = fingerprint(run.settings, run.model_args)
    if run.fingerprint is None or np.allclose(now, run.fingerprint, rtol=0, atol=1e-4, equal_nan=True):
        return ''
    return (f'three steps of a tiny model with position {run.settings["position"]} end at a loss of '
            f'{now[-1]:.4f}, and did at {run.fingerprint[-1]:.4f}')


def train_command(run):
    flags = [f'--{name}={value}' for name, value in run.asked.items()]
    begun = any(os.path.exists(os.path.join(run.folder, name)) for name in ('last.pt', 'ckpt.pt'))
    how = '--overwrite=True' if run.anew else '--init_from=resume'
    return [sys.executable, os.path.join(HERE, 'train.py'), *flags] + [how] * begun


def begin_training(run, threads):
    """
    Starts train.py for a run, in a process of its own that ends with this one, whatever ends it: see
    end_with_stdin(). What it prints goes to output.txt in the run's folder.
    """
    make_folder(run.folder)
    output = os.path.join(run.folder, 'output.txt')
    try:
        with open(output, 'a') as file:
            # a process group of its own: Ctrl-C reaches this script alone, which stops its runs, once
            return subprocess.Popen(train_command(run), stdin=subprocess.PIPE, stdout=file, stderr=file,
                                    process_group=0, env={**os.environ, **threads, END_WITH_STDIN: '1'})
    except OSError as error:
        fail(f'{output} cannot be written ({error.strerror}); choose another --out_dir, or remove it')


def train_missing(missing, jobs, bar):
    """
    Trains the missing runs, (run, steps done) each, `jobs` at a time. If one fails, or this script is
    stopped, the others are asked to save and stop.
    """
    threads = {'OMP_NUM_THREADS': str(max(1, os.cpu_count() // jobs))} if jobs > 1 else {}
    waiting, running = list(missing), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run, steps = waiting.pop(0)
                running.append(SimpleNamespace(process=begin_training(run, threads), folder=run.folder,
                                               steps=steps))
            time.sleep(0.2)
            for job in list(running):
                ended = job.process.poll() is not None
                log = read_log(job.folder)
                if log and log[-1].iteration > job.steps:
                    bar.update(log[-1].iteration - job.steps)
                    job.steps = log[-1].iteration
                if ended:
                    running.remove(job)
                    if job.process.returncode != 0:
                        with open(os.path.join(job.folder, 'output.txt'), errors='replace') as file:
                            fail(f'the run {job.folder} failed: {last_line(file.read())}')
                    result = f'validation loss {log[-1].val_loss:.4f} after {log[-1].seconds:.0f} s'
                    bar.write(f'{job.folder}: {result}', file=sys.stdout)
                    sys.stdout.flush()                  # the output may be a file, and more takes long
    except KeyboardInterrupt:
        bar.write('waiting for trainings to save and stop; the same command goes on', file=sys.stderr)
        raise
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()


# ------------------------------------------------------------------------------------------------------------

def check_flags():
    """One line for settings that make no sense, alone or together."""
    need_folder(out_dir)
    if retrain and (keep or folders):
        fail('--retrain trains --schemes anew whose code has changed; leave out '
             + ('--keep' if keep else 'it, and train the runs that are named by train.py --overwrite=True'))
    for name in ('position', 'init_from', 'overwrite', 'eval_only', 'wandb_run_name'):
        if name in given:
            fail(f'--{name} is for train.py alone; compare.py trains the --schemes that are missing from '
                 'scratch, and resumes what is not finished')
    passed_on = [name for name in given if name not in settings]
    if folders and passed_on:
        fail(f'--{passed_on[0]} is for training, and runs that are named are compared as they are; leave it '
             'out' + (', or use --scalings' if passed_on[0].startswith('rope_') else ''))
    if scalings is not None and not folders:
        fail('--scalings scores RoPE runs: name one or more, as in: '
             'python compare.py out/rope --scalings=none,yarn')


def write(name, text):
    write_whole(os.path.join(out_dir, name), lambda file: file.write(text.encode()))


def own_folder():
    """Makes out_dir, and keeps it for this process: of two comparisons at once the second ends."""
    make_folder(out_dir)
    lock(out_dir)


def compare_scalings(machine):
    """
    What --scalings asks for, scaling.md, printed too: RoPE runs at 1, 2, 4 and 8 times their trained length
    L. Runs trained from scratch are scored with each of the scalings switched on, factor = length / L,
    original length = L; runs that were trained on from others, as they are.
    """
    # Read in one pass, dynamic with factor 1 takes ntk's base for a factor of n / L: one row for both.
    names = ['ntk' if name == 'dynamic' else name for name in named(scalings, ROPE_SCALINGS, 'scaling')]
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if run.settings['position'] != 'rope':
            fail(f'--scalings is for RoPE runs, and {run.folder} has position {run.settings["position"]}; '
                 'name RoPE runs')
        if run.data != runs[0].data:
            fail(f'{runs[0].folder} and {run.folder} were trained on different data; '
                 'name runs of one data set')
        check_comparable([run], force)                  # is it finished?
    zero_shot = [run for run in runs if run.settings['init_from'] in ('scratch', 'resume')
                 and run.model_args['rope_scaling'] == 'none']
    trained_on = group_runs([run for run in runs if run not in zero_shot], but=('seed', 'init_from'))
    L = min(run.model_args['rope_original_length'] or run.model_args['block_size'] for run in runs)
    tokens = open_data(runs[0]).tokens('val')
    lengths, begin, number = sweep_plan(L, len(tokens), sweep_tokens, (1, 2, 4, 8))
    step = stride or max(L // 2, 1)
    models = len(set(names)) * len(zero_shot) + len(runs) - len(zero_shot)
    bar = tqdm(total=models * len(lengths), unit='evaluation', disable=not sys.stderr.isatty())

    def score(run, length, **changes):
        bar.update()
        model = load_model(run, machine, **changes)
        return losses_at_length(model, tokens, length, begin, number, step, machine)

    own_folder()
    rows = []                       # (name, runs, for each length and run what losses_at_length() finds)
    for scaling in dict.fromkeys(names) if zero_shot else ():
        factors = [1.0 if scaling == 'none' else length / L for length in lengths]
        rows.append(('ntk, dynamic' if scaling == 'ntk' else scaling, zero_shot, [
            [score(run, length, rope_scaling=scaling, rope_factor=factor, rope_original_length=L)
             for run in zero_shot] for length, factor in zip(lengths, factors)]))
    for group in trained_on:
        args, of_group = group.first.model_args, list(group.runs.values())
        name = f'{args["rope_scaling"]}, {group.first.settings["max_iters"]} steps at {args["block_size"]}'
        rows.append((name, of_group, [[score(run, length) for run in of_group] for length in lengths]))
    bar.close()
    text = scaling_report(rows, L, lengths, number, step, zero_shot)
    write('scaling.md', text)
    write('scaling.csv', scaling_csv(rows, L, lengths))
    print(text)


def plan(machine):
    """All runs of the comparison, and those that are still to be trained, with the steps they have done."""
    if folders:
        runs = [read_run(folder) for folder in folders]
        check_comparable(runs, force)
        for run in runs:
            if not keep and (changed := other_code(run)):
                fail(f'{run.folder} is of other code: {changed}; train it anew, or add --keep, which the '
                     'table will say')
        return runs, []
    names = list(SCHEMES) if schemes == 'all' else named(schemes, SCHEMES, 'scheme')
    asked = {name: value for name, value in given.items() if name not in settings or name == 'device'}
    runs = [planned_run(name, seed + i, os.path.join(out_dir, f'{name}-seed{seed + i}'), asked, machine,
                        by_config=not as_published)
            for i in range(seeds) for name in names]
    missing = [(run, steps) for run in runs if (steps := steps_done(run, retrain, keep)) is not None]
    if len(missing) < len(runs):
        print(f'{len(runs) - len(missing)} of {len(runs)} runs are finished already')
    return runs, missing


def main():
    check_flags()
    machine, code = pick_device(device), code_version()     # of the code that is running now
    if scalings is not None:
        return compare_scalings(machine)
    runs, missing = plan(machine)
    first, groups = runs[0].settings, group_runs(runs)      # runs share what `first` is asked for below
    block_size = min(run.model_args['block_size'] for run in runs)      # they differ only by --force
    validation_tokens = min(len(open_data(group.first).tokens('val')) for group in groups)
    multiples = [1 / 4, 1 / 2] + [2 ** i for i in range(int(math.log2(longest)) + 1)]
    sweep = sweep_plan(block_size, validation_tokens, sweep_tokens, multiples)
    step = stride or max(block_size // 2, 1)
    own_folder()

    models = {group.label: group.first.model_args for group in groups}
    plain = {'position': 'none', 'rope_scaling': 'none', 'rope_factor': 1.0}
    models.setdefault('none', {**runs[0].model_args, **plain})
    seconds = step_times(models, first, block_size, machine)

    # How long will it take? In training steps; to read a token costs a third of training on it.
    lengths, _, number = sweep
    overlap = [max(length / step, 1) for length in lengths]
    read = validation_tokens + number * (len(lengths) + sum(overlap))
    micro_batches = first['gradient_accumulation_steps']
    evaluation_steps = 1 + int(read / (3 * micro_batches * first['batch_size'] * block_size))
    steps_left = {run.folder: run.settings['max_iters'] - steps for run, steps in missing}
    training_time = sum(steps_left.get(run.folder, 0) * micro_batches * seconds[group.label]
                        for group in groups for run in group.runs.values())
    evaluation_time = len(runs) * evaluation_steps * micro_batches * np.mean(list(seconds.values()))
    if missing:
        print(f'{counted(len(missing), "run")} of {counted(first["max_iters"], "step")} to train: '
              f'about {duration(training_time)}; then ', end='')
    print(f'{counted(len(runs), "run")} to evaluate: about {duration(evaluation_time)}', flush=True)
    bar = tqdm(total=sum(steps_left.values()) + len(runs) * evaluation_steps, unit='step',
               disable=not sys.stderr.isatty(), dynamic_ncols=True, smoothing=0.05)

    train_missing(missing, jobs, bar)
    runs = [read_run(run.folder) for run in runs]
    forced, kept = check_comparable(runs, force), [run.folder for run in runs if other_code(run)]
    groups = group_runs(runs)
    for group in groups:
        model = GPT(GPTConfig(**group.first.model_args))
        group.parameters = model.get_num_params(non_embedding=False)
        group.own_parameters = model.get_num_position_params()
        group.notes = open_data(group.first).meta.get('notes', {})
        for run in group.runs.values():
            bar.set_postfix_str(f'evaluating {run.folder}')
            run.result = evaluate(run, block_size, sweep, step, machine, code)
            bar.update(evaluation_steps)
    bar.close()

    base = next((group for group in groups if group.label == 'learned'), groups[0])
    groups.sort(key=lambda group: np.mean([run.result['report_loss'] for run in group.runs.values()]))
    text = comparison(groups, base, block_size, sweep, step, seconds, forced, kept)
    write('table.md', text)
    write('results.csv', results_csv(groups, seconds))
    try:
        plots.draw_curves(groups, base.notes, os.path.join(out_dir, 'curves.png'))
        plots.draw_lengths(groups, block_size, os.path.join(out_dir, 'length.png'))
        plots.draw_positions(groups, base, os.path.join(out_dir, 'position.png'))
    except ImportError:
        print('no pictures are drawn: matplotlib is not installed')
    print(text)
    print(f'written to {out_dir}')


if __name__ == '__main__':
    for number in (signal.SIGTERM, signal.SIGHUP):          # its runs then stop too, and are saved
        if signal.getsignal(number) != signal.SIG_IGN:      # as nohup has it
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    main()
