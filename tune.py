"""
Which settings does each scheme get? Six trials each, the same number for all, so that none loses by its
default. RESULTS.md, section 0, says how the winner is chosen, and was written before the first trial.

    python tune.py --jobs=2                         # the eight schemes, 600 steps each trial
    python tune.py --schemes=t5 --max_iters=100     # quicker, and rougher

Three trials go to the learning rates, which all parameters share: as they are, halved, doubled. Three more,
at the best of these rates, go to what the scheme has of its own. Each trial is a run in out_dir, scored on
the plays that no final figure uses (choice) and on the two others (report). It leaves tuning.csv there. Any
setting of train.py goes to all trials.
"""
import os
from contextlib import nullcontext

from configurator import configure, count, fail, training_settings

# ------------------------------------------------------------------------------------------------------------
schemes = 'none,learned,sinusoidal,shaw,rope,alibi,t5,tupe'     # to be tuned
out_dir = 'out/tune'            # where the trials are trained, and tuning.csv written
max_iters: count = 600          # steps of a trial
seed = 1337                     # of all trials
jobs: count = 1                 # trainings side by side, each with its share of the CPU's cores
device = 'auto'                 # auto, cpu, cuda, cuda:0, mps
# ------------------------------------------------------------------------------------------------------------
if __name__ == '__main__':      # tests import the functions below
    settings, given, _ = configure(globals(), __file__, arguments_are='', passed_on=training_settings())
    common = {name: value for name, value in given.items() if name not in settings}

from tqdm import tqdm

from compare import planned_run, steps_done, train_missing
from dataset import make_folder, write_whole
from machine import git_commit, lock, pick_device
from measure import load_model, token_losses, tokens_of_choice
from model import SCHEMES
from runs import need_folder, open_data, read_run
from settle import FITS
from tables import csv_text, named

RATES = (1.0, 0.5, 2.0)
# What each scheme's own three trials change. Where a scheme trains nothing and has no number of its own to
# choose, its trials go to further learning rates.
OWN = {
    'learned': [dict(position_rate=0.3), dict(position_rate=3.0), dict(position_rate=10.0)],
    'sinusoidal': [dict(sinusoidal_scale=0.05), dict(sinusoidal_scale=0.1), dict(sinusoidal_scale=0.2)],
    'shaw': [dict(position_rate=3.0), dict(position_rate=10.0),
             dict(position_rate=10.0, shaw_max_distance=64)],
    'rope': [dict(rope_base=100.0), dict(rope_base=1000.0), dict(rope_base=100000.0)],
    't5': [dict(position_rate=10.0), dict(position_rate=30.0), dict(position_rate=10.0, t5_max_distance=64)],
    'tupe': [dict(position_rate=0.3), dict(position_rate=3.0), dict(position_rate=10.0)],
}
FURTHER_RATES = (0.7, 1.4, 2.8)


def rates(factor, machine):
    """The learning rates, times a factor, as settings; {} for 1."""
    usual = FITS.get(machine.type, FITS['cpu'])['learning_rate']
    muon = training_settings()['muon_learning_rate'].value
    return {} if factor == 1 else dict(learning_rate=factor * usual, muon_learning_rate=factor * muon)


def run_trials(trials, machine):
    """Trains what is missing of `trials`, (scheme, number, settings) each; a row of tuning.csv for each."""
    asked = {**common, 'max_iters': max_iters, 'device': device}
    runs = [planned_run(scheme, seed, os.path.join(out_dir, f'{scheme}-{number}'), {**asked, **settings},
                        machine, by_config=False) for scheme, number, settings in trials]
    missing = [(run, steps) for run in runs if (steps := steps_done(run, retrain=True)) is not None]
    with tqdm(total=sum(max_iters - steps for _, steps in missing), unit='step', disable=None) as bar:
        train_missing(missing, jobs, bar)
    rows = []
    for (scheme, number, settings), run in zip(trials, runs):
        flags = ' '.join(f'--{name}={value}' for name, value in settings.items())
        rows.append({'scheme': scheme, 'trial': number, 'settings': flags,
                     **scores(read_run(run.folder), machine)})
    return rows


def scores(run, machine):
    """A trial's losses after its last step, in nats per token: on the plays of choice, the others, all."""
    data = open_data(run)
    losses = token_losses(load_model(run, machine), data.tokens('val'), run.model_args['block_size'], machine,
                          nullcontext())
    choice = tokens_of_choice(run, data) or len(losses)
    parts = {'choice': losses[:choice], 'report': losses[choice:], 'all': losses}
    means = {name: round(float(part.mean(dtype='float64')), 5) for name, part in parts.items() if len(part)}
    return {**means, 'steps': run.log[-1].iteration, 'seconds': run.log[-1].seconds}


def main():
    need_folder(out_dir)
    machine, names = pick_device(device), named(schemes, SCHEMES, 'scheme')
    make_folder(out_dir)
    lock(out_dir)
    by_rate = run_trials([(name, number, rates(factor, machine)) for name in names
                          for number, factor in enumerate(RATES, start=1)], machine)
    write_rows(by_rate)
    second = []
    for name in names:
        best = min((row for row in by_rate if row['scheme'] == name), key=lambda row: row['choice'])
        factor = RATES[best['trial'] - 1]
        for number, changes in enumerate(OWN.get(name, [{}] * 3), start=4):
            further = factor if name in OWN else FURTHER_RATES[number - 4]
            second.append((name, number, {**rates(further, machine), **changes}))
    rows = by_rate + run_trials(second, machine)
    write_rows(sorted(rows, key=lambda row: (names.index(row['scheme']), row['trial'])))


def write_rows(rows):
    text = csv_text([list(rows[0]), *(list(row.values()) for row in rows)])
    write_whole(os.path.join(out_dir, 'tuning.csv'), lambda file: file.write(text.encode()))
    print(text)


if __name__ == '__main__':
    main()
