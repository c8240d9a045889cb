"""
What the tests of train.py share: a project folder with a tiny data set, and two ways to train in it: the real command, and, since
each command takes seconds to import PyTorch, the same file run within this process.
"""
import contextlib
import glob
import io
import os
import random
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, ROOT)

import dataset
from dataset import CharTokenizer, write_dataset

# A model that takes about a millisecond a step, on the data set that make_project() writes.
TINY = ['--device=cpu', '--dataset=tiny', '--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
        '--optimizer=adamw', '--learning_rate=1e-2', '--warmup_iters=5', '--max_iters=30', '--eval_interval=10', '--eval_windows=20']


def make_project(folder, files=True):
    """Makes `folder` a project: data/tiny, a data set of 20,000 + 3,001 characters, and unless files=False the code and the configs."""
    words = 'who has seen the wind? neither you nor i: but when the trees bow down their heads, the wind is passing by.'.split()
    chance = random.Random(0)
    text = ''.join(chance.choice(words) + chance.choice('   \n') for _ in range(6000))[:23001]
    os.makedirs(os.path.join(folder, 'data', 'tiny'))
    with contextlib.redirect_stdout(io.StringIO()):
        write_dataset(os.path.join(folder, 'data', 'tiny'), text[:20000], text[20000:], CharTokenizer(text), 'made up')
    with open(os.path.join(folder, 'data', 'tiny', 'prepare.py'), 'w') as file:
        file.write('raise SystemExit(2)     # never needed\n')
    if files:
        for path in glob.glob(os.path.join(ROOT, '*.py')):
            shutil.copy(path, folder)
        shutil.copytree(os.path.join(ROOT, 'config'), os.path.join(folder, 'config'))
    return str(folder)


def train_command(project, *flags, start=(sys.executable,), **options):
    """The real command, started in the project's folder and not waited for: a subprocess.Popen. start: (python,) or torchrun's words."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore', **options.pop('environment', {})}
    return subprocess.Popen([*start, os.path.join(project, 'train.py'), *flags], cwd=project, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def train(project, *flags, stderr=None, curve=False):
    """
    Runs train.py within this process, in the project's folder, on its data: as the command does, one thread, flags behind TINY's.

    Returns code (its exit status), out, err (what it printed) and variables (train.py's globals at its end). curve=False leaves out
    the picture, whose import takes longer than such a run.
    """
    script = os.path.join(ROOT, 'train.py')
    variables = {'__name__': '__main__', '__file__': script}
    stdout, stderr, code = io.StringIO(), stderr or io.StringIO(), 0
    before = sys.argv, os.getcwd(), dataset.DATA, torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    matplotlib = sys.modules.get('matplotlib')
    try:
        sys.argv, dataset.DATA = [script, *TINY, *flags], os.path.join(project, 'data')
        os.chdir(project)
        torch.set_num_threads(1)
        if not curve:
            sys.modules['matplotlib'] = None            # importing it is then an ImportError
        with open(script, encoding='utf-8') as file, contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            exec(compile(file.read(), script, 'exec'), variables)
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv, folder, dataset.DATA, threads = before
        os.chdir(folder)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if not curve:
            del sys.modules['matplotlib']
            if matplotlib is not None:
                sys.modules['matplotlib'] = matplotlib
    return SimpleNamespace(code=code, out=stdout.getvalue(), err=stderr.getvalue(), variables=variables)


def trained(project, *flags, **options):
    """The same for a run that is expected to succeed."""
    run = train(project, *flags, **options)
    assert run.code == 0, run.err
    return run


def assert_refused(run, *words):
    """Exit status 2 and one line on stderr, which holds the words."""
    assert run.code == 2, run.out + run.err
    assert len(run.err.splitlines()) == 1, run.err
    for word in words:
        assert word in run.err


@contextlib.contextmanager
def at_step(number, action, monkeypatch):
    """Within the block, `action` is called once, when a run in this process clips the gradients of its step `number`, counted from 0."""
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clip_and_act(*arguments, **options):
        calls.append(None)
        if len(calls) == number + 1:
            action()
        return clip(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, 'clip_grad_norm_', clip_and_act)
        yield


def state(project, name, file='last.pt'):
    """The checkpoint of the run out/<name>."""
    return torch.load(os.path.join(project, 'out', name, file), weights_only=True)


def read_log(project, name):
    """log.csv of the run out/<name>, without its header: a list of rows of numbers, '' where one is empty."""
    with open(os.path.join(project, 'out', name, 'log.csv')) as file:
        rows = [line.split(',') for line in file.read().splitlines()]
    assert rows[0] == ['iter', 'tokens', 'seconds', 'lr', 'train_loss', 'val_loss']
    return [[float(entry) if entry else '' for entry in row] for row in rows[1:]]


def without_times(rows):
    return [row[:2] + row[3:] for row in rows]


def differences(one, other, path='state'):
    """Where two checkpoints differ: a list of paths into them. Times, and where the run is written, may differ."""
    if path in ("state['seconds']", "state['wandb_id']", "state['config']['out_dir']", "state['config']['overwrite']"):
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
