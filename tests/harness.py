"""
What the tests of the scripts share: a project folder with a tiny data set, and two ways to run a script in it: the real command, and,
since each command takes seconds to import PyTorch, the same file run within this process.
"""
import contextlib
import functools
import glob
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, ROOT)

import dataset
import machine
import measure
from dataset import CharTokenizer, write_dataset

# A model that takes about a millisecond a step, on the data set that make_project() writes.
TINY = ['--device=cpu', '--dataset=tiny', '--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
        '--optimizer=adamw', '--learning_rate=1e-2', '--warmup_iters=5', '--max_iters=30', '--eval_interval=10',
        '--eval_windows=20']
UNSEEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)    # which users are not shown
WORDS = 'who has seen the wind? neither you nor i: but when the trees bow down their heads, the wind is passing by.'.split()


# ----------------------------------------------------------------------------------------------------------------------
# projects

def write(path, content):
    """Writes a file, text or bytes, and the folders above it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb') as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read(path):
    with open(path, 'rb') as file:
        return file.read()


def make_data(folder, text, train_tokens):
    """A data set of characters, in silence."""
    with contextlib.redirect_stdout(io.StringIO()):
        write_dataset(folder, text[:train_tokens], text[train_tokens:], CharTokenizer(text), 'made up')


def make_project(folder, files=True):
    """Makes `folder` a project: data/tiny, of 20,000 + 3,001 characters, and unless files=False the code and the configs."""
    chance = random.Random(0)
    text = ''.join(chance.choice(WORDS) + chance.choice('   \n') for _ in range(6000))[:23001]
    make_data(os.path.join(folder, 'data', 'tiny'), text, 20000)
    write(os.path.join(folder, 'data', 'tiny', 'prepare.py'), 'raise SystemExit(2)     # never needed\n')
    if files:
        for path in glob.glob(os.path.join(ROOT, '*.py')):
            shutil.copy(path, folder)
        shutil.copytree(os.path.join(ROOT, 'config'), os.path.join(folder, 'config'))
    return str(folder)


def tree(folder):
    """Everything in a folder, {path: (size, time of its last change)}: what is written there shows."""
    found = {}
    for parent, _, files in os.walk(folder):
        for path in [parent, *(os.path.join(parent, file) for file in files)]:
            found[path] = os.path.getsize(path), os.stat(path).st_mtime_ns
    return found


def contents(folder):
    """Every file in a folder, {name: bytes}."""
    return {name: read(os.path.join(folder, name)) for name in os.listdir(folder)}


# ----------------------------------------------------------------------------------------------------------------------
# running scripts

@functools.cache
def compiled(path, changed):
    with open(path, encoding='utf-8') as file:
        return compile(file.read(), path, 'exec')


def run(folder, script, *arguments, stderr=None, picture=False):
    """
    Runs `script`, a path in the repository (or elsewhere, if it is absolute), within this process: as the command does in the working
    directory `folder`, on the data sets in folder/data, with one thread.

    Returns script, code (the exit status), out and err (what was printed, warnings included). What would be a traceback is raised.
    picture=False leaves out matplotlib, whose import takes longer than all else.
    """
    path = os.path.join(ROOT, script)
    before = sys.argv, list(sys.path), os.getcwd(), dataset.DATA, torch.get_num_threads(), sys.excepthook
    fingerprint = measure.fingerprint
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)}
    matplotlib = sys.modules.get('matplotlib')
    out, err, code = io.StringIO(), stderr or io.StringIO(), 0
    try:
        sys.argv, dataset.DATA = [path, *arguments], os.path.join(folder, 'data')
        sys.path.insert(0, os.path.dirname(path))
        os.chdir(folder)
        torch.set_num_threads(1)
        if os.path.basename(path) != 'compare.py':      # three steps of another model, which tests would count
            measure.fingerprint = lambda settings, model_args: None
        if not picture:
            sys.modules['matplotlib'] = None            # importing it is then an ImportError
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter('default')
            exec(compiled(path, os.stat(path).st_mtime_ns), {'__name__': '__main__', '__file__': path})
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        measure.fingerprint = fingerprint
        sys.argv, sys.path[:], there, dataset.DATA, threads, sys.excepthook = before
        os.chdir(there)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        while machine.LOCKS:                            # the end of a process would
            os.close(machine.LOCKS.pop())
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if not picture:
            del sys.modules['matplotlib']
            if matplotlib is not None:
                sys.modules['matplotlib'] = matplotlib
    for warning in shown:
        if not issubclass(warning.category, UNSEEN):
            err.write(f'{warning.category.__name__}: {warning.message}\n')
    return SimpleNamespace(script=script, code=code, out=out.getvalue(), err=err.getvalue())


def ran(folder, script, *arguments, **options):
    """The same for a run that is expected to succeed."""
    result = run(folder, script, *arguments, **options)
    assert result.code == 0, result.err
    return result


def train(project, *flags, **options):
    """Runs train.py in the project, with the flags behind TINY's."""
    return run(project, 'train.py', *TINY, *flags, **options)


def trained(project, *flags, **options):
    return ran(project, 'train.py', *TINY, *flags, **options)


def start(folder, script, *arguments, python=(sys.executable,), **options):
    """The real command, not waited for: a subprocess.Popen. python: (sys.executable,) or torchrun's words; options: Popen's."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore', **options.pop('env', {})}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*python, os.path.join(ROOT, script), *arguments], cwd=folder, env=environment, **{**pipes, **options})


def command(folder, script, *arguments, timeout=300, **options):
    """The real command, to its end: as run() returns it."""
    with start(folder, script, *arguments, **options) as process:
        out, err = process.communicate(timeout=timeout)
    return SimpleNamespace(script=script, code=process.returncode, out=out, err=err)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@contextlib.contextmanager
def at_step(number, action, monkeypatch):
    """Within the block, `action` is called once, when a run in this process clips the gradients of its step `number`, from 0."""
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clip_and_act(*arguments, **options):
        calls.append(None)
        if len(calls) == number + 1:
            action()
        return clip(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, 'clip_grad_norm_', clip_and_act)
        yield


# ----------------------------------------------------------------------------------------------------------------------
# refusals

def assert_one_line(err, *words):
    assert err.endswith('\n') and len(err.splitlines()) == 1 and len(err) < 1000, err
    for word in words:
        assert word in err, (word, err)


def assert_refused(result, *words):
    """Exit status 2, and one line on stderr: the script's name, and what it says, in which the words occur."""
    assert result.code == 2, (result.code, result.out, result.err)
    assert result.err.startswith(os.path.basename(result.script) + ': '), result.err
    assert_one_line(result.err, *words)


def assert_fails(capsys, function, *words):
    """The same of a function that is called within this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        function()
    assert stop.value.code == 2
    assert_one_line(capsys.readouterr().err, *words)


# ----------------------------------------------------------------------------------------------------------------------
# what a run of train.py's leaves behind

def state(project, name, file='last.pt'):
    """The checkpoint of the run out/<name>."""
    return torch.load(os.path.join(project, 'out', name, file), weights_only=True)


def read_log(project, name):
    """log.csv of the run out/<name>, without its header: a list of rows of numbers, '' where one is empty."""
    header, *rows = read(os.path.join(project, 'out', name, 'log.csv')).decode().splitlines()
    assert header == 'iter,tokens,seconds,lr,train_loss,val_loss'
    return [[float(entry) if entry else '' for entry in row.split(',')] for row in rows]


def without_times(rows):
    return [row[:2] + row[3:] for row in rows]


def differences(one, other, path='state'):
    """Where two checkpoints differ: a list of paths into them. Times, and where the run is written, may differ."""
    if path in ("state['seconds']", "state['wandb_id']", "state['run']", "state['config']['out_dir']", "state['config']['overwrite']"):
        return []
    if path == "state['log']":
        one, other = without_times(one), without_times(other)
    if isinstance(one, torch.Tensor):
        return [] if isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other) else [path]
    if type(one) is not type(other) or isinstance(one, (dict, list, tuple)) and len(one) != len(other):
        return [path]
    if isinstance(one, dict):
        return [found for key in one for found in
                (differences(one[key], other[key], f'{path}[{key!r}]') if key in other else [f'{path}[{key!r}]'])]
    if isinstance(one, (list, tuple)):
        return [found for i in range(len(one)) for found in differences(one[i], other[i], f'{path}[{i}]')]
    return [] if one == other else [path]


def differences_of_runs(project, one, other):
    """Where the runs out/<one> and out/<other> differ: in last.pt, ckpt.pt or log.csv."""
    found = [f'{file}: {difference}' for file in ('last.pt', 'ckpt.pt')
             for difference in differences(state(project, one, file), state(project, other, file))]
    return found + ['log.csv'] * (without_times(read_log(project, one)) != without_times(read_log(project, other)))
