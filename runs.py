"""
Runs. A run is a folder: last.pt and ckpt.pt, its last state and its best, log.csv, config.json and loss.png.
Here is what it writes while it is trained, and how finished runs are read, compared and put in groups.
"""
import contextlib
import csv
import functools
import io
import json
import math
import os
import platform
import re
import secrets
from types import SimpleNamespace

import numpy as np
import torch

from checkpoints import DIGESTED, digest, load_checkpoint, make_config, make_model, own_checkpoints
from configurator import TOO_LARGE, cut, fail, scheme_options, suits, training_settings
from dataset import (Dataset, data_folder, make_folder, name_of_data, remove_parts, write_together,
                     write_whole)
from machine import git_commit, lock, machine_name, rank_and_world_size, say
from streams import open_text


# ------------------------------------------------------------------------------------------------------------
# files

def need_folder(path):
    """One line unless files can be written to the folder `path`, whether it is there or is yet to be made."""
    if path.startswith('~'):
        fail(f'{path} would be a folder called ~, since the shell has left it as it is; write the path out')
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        fail(f'nothing can be written to {path}, since {there} is a file; choose another folder')
    if not os.access(there, os.W_OK | os.X_OK):
        fail(f'nothing can be written to {path}: {there} is not yours to write to; choose another folder')


def check_free(folder, overwrite):
    """One line unless a new run may be written to a folder. It replaces a run, if asked to; nothing else."""
    there = [file for file in FILES if os.path.lexists(os.path.join(folder, file))]
    if there and not is_run(folder):
        fail(f'{folder} holds {", ".join(there)} of another origin, which would be replaced; choose another '
             '--out_dir, or move that away')
    if set(there) - {'config.json'} and not overwrite:          # that alone is no run yet
        resume = ', --init_from=resume' if {'last.pt', 'ckpt.pt'} & set(there) else ''
        fail(f'{folder} already holds a run; add --overwrite=True{resume}, or another --out_dir')


def is_run(folder):
    """Whether a folder's files are a run's: its config.json says so, or if there is none its checkpoint."""
    try:
        return {'settings', 'model_args', 'data'} <= read_config(folder).keys()
    except FileNotFoundError:
        paths, remedy = own_checkpoints(folder), 'move it away, or choose another --out_dir'
        return bool(paths) and 'data' in load_checkpoint(paths[0], remedy=remedy)
    except (OSError, AttributeError, ValueError, RecursionError):
        return False


def read_config(folder):
    """What is in a run's config.json, unchecked; OSError, ValueError or RecursionError if that is no JSON."""
    with open_text(os.path.join(folder, 'config.json'), largest=2 ** 24) as file:
        return json.load(file)


# ------------------------------------------------------------------------------------------------------------
# a run in training

FILES = ('last.pt', 'ckpt.pt', 'log.csv', 'config.json', 'loss.png')
COLUMNS = ('iter', 'tokens', 'seconds', 'lr', 'train_loss', 'val_loss')         # of log.csv


class Run:
    """Where a run stands, and what it writes. Of several processes the first one writes."""

    def __init__(self, settings, model_args, data, model, optimizers, scaler, batch_generator):
        self.settings, self.model_args, self.data = settings, model_args, data
        self.model, self.optimizers = model, optimizers
        self.scaler, self.batch_generator = scaler, batch_generator
        self.folder, self.writes = settings['out_dir'], rank_and_world_size()[0] == 0
        self.name = os.path.basename(os.path.abspath(self.folder))
        self.tokens_per_iter = math.prod(settings[key] for key in
                                         ('gradient_accumulation_steps', 'batch_size', 'block_size'))
        self.iteration, self.seconds, self.best_val_loss, self.wandb = 0, 0.0, math.inf, Wandb()
        self.log = []                                   # log.csv's rows
        self.mark, self.saved = secrets.token_hex(8), False     # tells its files from those of other runs
        self.loss_sum, self.loss_count = 0.0, 0         # of the training batches since the last row
        self.fingerprint = None                         # of the code that trains it, from begin() on

    def path(self, file):
        return os.path.join(self.folder, file)

    def go_on(self, start):
        """Takes up a run where its checkpoint left it: see settle()."""
        source, settings, best = start.source, self.settings, self.path('ckpt.pt')
        self.mark, self.saved = source.get('run') or self.mark, True
        try:
            for optimizer, state in zip(self.optimizers, source['optimizer'], strict=True):
                optimizer.load_state_dict(state)
                for parameter, kept in optimizer.state.items():
                    if any(tensor.dim() and tensor.shape != parameter.shape for tensor in kept.values()):
                        raise ValueError('a momentum of another shape')
            if source['scaler']:                        # empty unless float16 was used
                self.scaler.load_state_dict(source['scaler'])
            self.batch_generator.set_state(source['batch_generator'])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            fail(f'{start.source_path} is damaged: its optimizer or its random numbers cannot be restored; '
                 f'{start.remedy}')
        self.iteration, self.seconds, self.log = source['iter_num'], source['seconds'], source['log']
        self.loss_sum, self.loss_count = source['loss_sum'], source['loss_count']
        self.wandb.id = source['wandb_id']
        if os.path.exists(best):        # an evaluation ahead of last.pt, perhaps: a kill came between
            remedy = f'delete it: resuming then goes on from {self.path("last.pt")}'
            found = load_checkpoint(best, remedy=remedy)
            if found.get('run') in (None, source.get('run')) or not source.get('run'):  # older ones have none
                self.best_val_loss = found.get('best_val_loss', math.inf)
            elif os.path.exists(self.path('config.json')):
                fail(f'{best} and {start.source_path} are of different runs; move {best} away, and resuming '
                     'goes on from the other')
            else:                       # a kill came in the middle of save()'s replacing of a run
                self.saved = False
        max_iters, decay_iters = settings['max_iters'], settings['lr_decay_iters']
        if self.iteration > max_iters:
            fail(f'{self.folder} has done {self.iteration} steps, and max_iters {max_iters} is below that; '
                 'give a larger --max_iters')
        if not settings['eval_only']:
            say(f'going on from step {self.iteration:,}' if self.iteration < max_iters else
                f'{self.folder} has done all of its {max_iters:,} steps; a larger --max_iters goes on')
        longer = max_iters > source['config']['max_iters']
        same_schedule = decay_iters == source['config']['lr_decay_iters']
        if settings['decay_lr'] and longer and same_schedule and decay_iters < max_iters:
            say(f'from step {decay_iters:,} on the learning rate is min_lr, {settings["min_lr"]}; '
                f'--lr_decay_iters={max_iters} stretches its schedule')

    def begin(self, resuming):
        """Makes the folder ready and starts wandb. A run that is there stays until save() replaces it."""
        if not self.writes:
            return
        settings = self.settings
        from measure import fingerprint                 # which reads runs, and so imports this file
        self.fingerprint = fingerprint(settings, self.model_args)
        if resuming:
            self.compare_threads()
        else:
            make_folder(self.folder)
            lock(self.folder)
            check_free(self.folder, settings['overwrite'])      # still, now that nobody else can write to it
        self.wandb = Wandb(settings['wandb_log'], project=settings['wandb_project'], config=settings,
                           name=settings['wandb_run_name'] or self.name, id=self.wandb.id)
        remove_parts(self.folder, FILES)
        if self.saved:
            write_whole(self.path('config.json'), self.write_config)

    def compare_threads(self):
        """Says so where going on cannot be bit for bit: other threads add up sums in another order."""
        now, before = torch.get_num_threads(), None
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            before = read_config(self.folder)['versions']['threads']
        if type(before) is int and before != now and self.iteration < self.settings['max_iters']:
            say(f'{now} threads, where the run had {before}: it goes on, but not bit for bit; with '
                f'OMP_NUM_THREADS={before} it does')

    def write_config(self, file):
        versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                        device=str(next(self.model.parameters()).device), threads=torch.get_num_threads(),
                        machine=machine_name(), git_commit=git_commit())
        content = json.dumps(dict(settings=self.settings, model_args=self.model_args, versions=versions,
                                  fingerprint=self.fingerprint, data=self.data.meta['sha256'],
                                  run=self.mark), indent=1)
        file.write(content.encode())

    def has_row(self):
        """Whether the log has a row for the step at which the run stands."""
        return bool(self.log) and self.log[-1][0] == self.iteration

    def training_loss(self):
        """The mean loss of the training batches since the last row; '' if there is none."""
        return self.loss_sum / self.loss_count if self.loss_count else ''

    def add_row(self, learning_rate, val_loss):
        """A row for log.csv, and the same numbers for wandb."""
        self.log.append([self.iteration, self.iteration * self.tokens_per_iter, round(self.seconds, 3),
                         learning_rate, self.training_loss(), val_loss])
        self.loss_sum, self.loss_count = 0.0, 0
        self.wandb.log(dict(zip(COLUMNS, self.log[-1])))

    def save(self, file):
        """
        Everything that going on needs, and with nanoGPT's keys what sampling needs. The first time all files,
        which only then replace those of a run that --overwrite gives up: last.pt first, so that what is gone
        on with is the one run or the other, whenever a kill comes; meanwhile there is no config.json.
        """
        if not self.writes:
            return
        state = dict(
            model=self.model.state_dict(), model_args=self.model_args, config=self.settings,
            tokenizer=self.data.meta['tokenizer'], data=self.data.meta['sha256'],
            optimizer=[optimizer.state_dict() for optimizer in self.optimizers],
            scaler=self.scaler.state_dict(), batch_generator=self.batch_generator.get_state(),
            iter_num=self.iteration, best_val_loss=self.best_val_loss, seconds=self.seconds, log=self.log,
            loss_sum=self.loss_sum, loss_count=self.loss_count, wandb_id=self.wandb.id, run=self.mark)
        state['digests'] = {part: digest(state[part]) for part in DIGESTED}
        write = functools.partial(torch.save, state)
        if self.saved:
            write_whole(self.path(file), write)
            return
        writers = {'last.pt': write, 'ckpt.pt': write, 'log.csv': self.write_rows,
                   'config.json': self.write_config}
        write_together({self.path(name): write for name, write in writers.items()})
        with contextlib.suppress(OSError):
            os.remove(self.path('loss.png'))
        self.saved = True

    def write_rows(self, file):
        text = io.StringIO()
        csv.writer(text, lineterminator='\n').writerows([COLUMNS, *self.log])
        file.write(text.getvalue().encode())

    def write_log(self):
        if self.writes:
            write_whole(self.path('log.csv'), self.write_rows)

    def draw(self):
        if self.writes:
            try:
                from plots import draw_loss
                title = f'{self.name}: position = {self.settings["position"]}'
                draw_loss(self.log, self.path('loss.png'), title, self.data.meta.get('notes', ()))
            except ImportError:
                say('no curve is drawn: matplotlib is not installed')
            except Exception as error:                  # a name that it cannot write, with one $ or no UTF-8
                say(f'no curve is drawn ({type(error).__name__})')


class Wandb:
    """wandb's run, which gets log.csv's rows. Where it is off, or once it has failed, this does nothing."""

    def __init__(self, on=False, **options):
        self.run, self.id = None, options.get('id')
        if on:
            self.attempt(lambda: self.start(options))

    def start(self, options):
        import wandb
        self.run = wandb.init(resume='allow', **options)
        self.id = self.run.id

    def attempt(self, act):
        """Whatever ails wandb: one line, and training goes on."""
        try:
            act()
        except (Exception, SystemExit) as error:        # it ends the script for a user's mistake
            self.run = None
            reason = (str(error) or type(error).__name__).splitlines()[0]
            say(f'wandb does not work ({reason}): training goes on without it')

    def log(self, row):
        if self.run is not None:
            known = {key: number for key, number in row.items() if number != ''}
            self.attempt(lambda: self.run.log(known, step=row['iter']))

    def finish(self):
        if self.run is not None:
            self.attempt(self.run.finish)


# ------------------------------------------------------------------------------------------------------------
# finished runs, and which of them can be compared

SCHEME_SETTINGS = ('position', *scheme_options(), 'learning_rate', 'muon_learning_rate', 'position_rate')
FREE_SETTINGS = ('cpu_rate', 'dataset', 'out_dir', 'overwrite', 'log_interval', 'eval_only', 'wandb_log',
                 'wandb_project', 'wandb_run_name', 'device', 'compile', 'backend', 'deterministic')
# What every run has to say of itself to be compared
NEEDED = ('position', 'seed', 'dataset', 'init_from', 'block_size', 'batch_size',
          'gradient_accumulation_steps', 'n_layer', 'n_head', 'n_embd', 'optimizer', 'learning_rate',
          'muon_learning_rate', 'max_iters', 'weight_decay', 'beta1', 'beta2', 'grad_clip', 'eval_windows',
          'dtype', 'compile')
OF_ITS_OWN = ('seed', *SCHEME_SETTINGS)                 # what may differ between runs that are compared


def checked(config):
    """
    A config.json's settings, model_args and data. ValueError or TypeError, with one sentence, unless they
    are of the kind that train.py writes.
    """
    parts = {name: isinstance(config, dict) and config.get(name)
             for name in ('settings', 'model_args', 'data')}
    if not all(isinstance(part, dict) for part in parts.values()):
        raise ValueError('it lacks settings, model_args or data')
    run, declared = SimpleNamespace(**parts), training_settings()
    for name in NEEDED:
        if run.settings.get(name) is None:
            raise ValueError(f'it lacks the setting {name}')
    for name, value in run.settings.items():
        if name in declared and not suits(value, declared[name]):
            raise ValueError(f'the setting {name} cannot be {value!r}')
        if run.model_args.get(name, value) != value:
            raise ValueError(f'settings and model_args differ in {name}')
    run.model_args = vars(make_config(run.model_args))
    run.fingerprint, run.versions = config.get('fingerprint'), config.get('versions', {})
    if not isinstance(run.versions, dict):
        raise ValueError('its versions are none')
    if run.fingerprint is not None and not (        # runs from before there were any have none
            isinstance(run.fingerprint, list) and len(run.fingerprint) == 3
            and all(type(loss) is float for loss in run.fingerprint)):
        raise ValueError('its fingerprint is none')
    return run


def read_log(folder):
    """
    The rows of a run's log.csv, with iteration, tokens, seconds and val_loss; none if it is not there yet.
    One line if they are not what train.py writes.
    """
    path = os.path.join(folder, 'log.csv')
    try:
        with open_text(path) as file:
            rows = [SimpleNamespace(iteration=int(row['iter']), tokens=int(row['tokens']),
                                    seconds=float(row['seconds']), val_loss=float(row['val_loss']))
                    for row in csv.DictReader(file)]
        steps = [row.iteration for row in rows]
        if steps != sorted(set(steps)) or not all(
                0 <= number < TOO_LARGE for row in rows for number in vars(row).values()):      # nor is NaN
            raise ValueError
        return rows
    except FileNotFoundError:
        return []
    except OSError as error:
        fail(f'{path} cannot be read ({error.strerror}); check the file')
    except (ValueError, KeyError, TypeError, csv.Error):
        fail(f'{path} is damaged: it is no table of steps and losses; resume the run, which writes it again')


def read_run(folder):
    """A run, by config.json and log.csv: settings, model_args, data, log, finished. One line if none."""
    path = os.path.join(folder, 'config.json')
    resume = f'`python train.py --out_dir={folder} --init_from=resume` writes it again'
    written = own_checkpoints(folder) and resume
    try:
        run = checked(read_config(folder))
        run.folder = folder
    except (FileNotFoundError, NotADirectoryError):
        remedy = written or 'name the folder of a finished run'
        fail(f'{folder} holds no run: it has no config.json; {remedy}')
    except OSError as error:
        fail(f'{path} cannot be read ({error.strerror}); check the path')
    except (ValueError, TypeError, RuntimeError) as error:      # no JSON, nested beyond reason, checked()'s
        lost = 'there is no checkpoint to resume either: train the run again, in another folder'
        fail(f'{path} is damaged ({cut(str(error))}); {written or lost}')
    run.log = read_log(folder)
    at_end = bool(run.log) and run.log[-1].iteration >= run.settings['max_iters']
    run.finished = at_end and any(os.path.exists(os.path.join(folder, name))
                                  for name in ('last.pt', 'evaluation.json'))
    return run


def differences(one, other, but=OF_ITS_OWN):
    """
    What keeps two runs from being compared, in words such as 'n_layer 4 against 6'. Settings that are of no
    consequence for the loss may differ, and those in `but`; the data are compared by their contents.
    """
    found = []
    if one.data != other.data:
        names = [run.settings['dataset'] for run in (one, other)]
        found.append('data {} against {}'.format(*names) if names[0] != names[1] else
                     f'two versions of the data set {names[0]}')
    defaults = training_settings()                      # a run from before a setting has its default
    for key in defaults:
        values = [run.settings.get(key, defaults[key].value) for run in (one, other)]
        if key == 'init_from':                          # one that was interrupted is as good as any
            values = ['scratch' if value == 'resume' else value for value in values]
        if key not in FREE_SETTINGS and key not in but and values[0] != values[1]:
            found.append(f'{key} {values[0]} against {values[1]}')
    return found


def check_comparable(runs, force):
    """One line that names the first difference that matters; unless `force`, which returns all of them."""
    forced = []
    for run in runs:
        if not run.finished:
            steps = run.log[-1].iteration if run.log else 0
            fail(f'{run.folder} is not finished: it stands at step {steps} of {run.settings["max_iters"]}, '
                 f'or lost its last.pt; train it to its end with `python train.py --out_dir={run.folder} '
                 '--init_from=resume`')
        found = differences(runs[0], run)
        if found and not force:
            fail(f'{runs[0].folder} and {run.folder} cannot be compared: {", ".join(found)}; '
                 'name runs that differ only in their scheme and seed, or add --force')
        forced += [f'{run.folder}: {words}' for words in found]
    return forced


def group_runs(runs, but=('seed',)):
    """
    The runs that differ in nothing but their seeds, together, or in what `but` names: a list of groups with
    position, label and runs, {seed: run}. A group is called after its scheme, or where two share a scheme
    after its first run's folder.
    """
    groups = []
    for run in runs:
        for group in groups:
            if not differences(group.first, run, but):
                break
        else:
            group = SimpleNamespace(first=run, position=run.settings['position'], runs={})
            groups.append(group)
        seed = run.settings['seed']
        if seed in group.runs:
            fail(f'{group.runs[seed].folder} and {run.folder} are the same run: scheme {group.position}, '
                 f'seed {seed}; name one of them')
        group.runs[seed] = run
    positions = [group.position for group in groups]
    for group in groups:
        folder = os.path.basename(os.path.normpath(group.first.folder))
        shared = positions.count(group.position) > 1
        group.label = re.sub(r'-seed\d+$', '', folder) if shared else group.position
    return groups


def open_data(run):
    """The data set that a run was trained on. One line if it has changed since."""
    data = Dataset(data_folder(name_of_data(run.data, run.settings['dataset'])))
    if data.meta['sha256'] != run.data:
        fail(f'the data set {run.settings["dataset"]} is not what {run.folder} was trained on; prepare it '
             'again as it was then')
    return data
