"""
Kills, signals, full disks, damaged files, numbers that overflow: no run is lost, and one line says what happened and what to do.
(tests/slow/ has kills at random moments, a disk that is full in earnest, and torchrun.)
"""
import errno
import os
import random
import shutil
import signal

import pytest
import torch

import measure
from harness import (ROOT, TINY, assert_one_line, assert_refused, command, contents, differences, differences_of_runs, make_project, ran,
                     read, read_log, run, start, state, train, trained, write)
from runs import load_checkpoint


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A project, with a run out/whole of 30 steps that nothing happened to."""
    folder = make_project(tmp_path_factory.mktemp('project'))
    trained(folder, '--out_dir=out/whole')
    return folder


@pytest.fixture
def spoilt(project):
    """A copy of out/whole, out/spoilt, to do harm to."""
    folder = os.path.join(project, 'out', 'spoilt')
    shutil.copytree(os.path.join(project, 'out', 'whole'), folder)
    yield folder
    shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------------------------------------
# kills and signals

class Killed(BaseException):
    """Stands for SIGKILL: nobody catches it."""


def test_killed_after_each_file(project, monkeypatch):
    """Every place between two files: in particular between ckpt.pt and last.pt, where the best is ahead of the last."""
    replace, replaced = os.replace, []

    def replace_and_die(part, path):
        replace(part, path)
        replaced.append(os.path.basename(path))
        if len(replaced) == dies_after:
            raise Killed

    monkeypatch.setattr(os, 'fsync', lambda file: None)                 # for speed
    for dies_after in range(1, 16):
        replaced.clear()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, 'replace', replace_and_die)
            train(project, '--out_dir=out/killed')
        folder = os.path.join(project, 'out', 'killed')
        begun = {'ckpt.pt', 'last.pt'} & set(os.listdir(folder))
        trained(project, '--out_dir=out/killed', *(['--init_from=resume'] if begun else []))
        assert not differences_of_runs(project, 'whole', 'killed')
        shutil.rmtree(folder)
    # at step 0 all of them, and last.pt and log.csv again; ckpt.pt, last.pt and log.csv at steps 10 and 20, and at the end
    assert replaced == ['last.pt', 'ckpt.pt', 'log.csv', 'config.json', 'last.pt', 'log.csv'] + 3 * ['ckpt.pt', 'last.pt', 'log.csv']


def train_here(project, *flags, **options):
    """The project's own train.py as a real command."""
    return start(project, os.path.join(project, 'train.py'), *TINY, *flags, **options)


def test_ctrl_c_saves_and_says_how_to_go_on(project):
    flags = ['--out_dir=out/interrupted', '--max_iters=1000000', '--eval_interval=1000000']
    process = train_here(project, *flags)
    assert any(line.startswith('step 0') for line in iter(process.stdout.readline, ''))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and err == ''
    steps = state(project, 'interrupted')['iter_num']
    assert out == f'stopped at step {steps} and saved; the same command with --init_from=resume goes on\n'
    run = trained(project, *flags, '--init_from=resume', f'--max_iters={steps + 5}')
    assert f'going on from step {steps:,}' in run.out and state(project, 'interrupted')['iter_num'] == steps + 5


@pytest.mark.parametrize('by', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('scoring', ['last windows', 'whole text'])
def test_a_signal_during_the_last_scoring_stops_the_run(scoring, by, project, monkeypatch):
    """It is saved by then: the same command goes on with the scoring, to what it would have been."""
    score, calls = measure.sum_of_losses, []

    def score_and_signal(*arguments):
        calls.append(None)
        if len(calls) == (4 if scoring == 'last windows' else 5):           # at steps 0, 10, 20 and 30, then all
            os.kill(os.getpid(), by)
        return score(*arguments)

    shutil.rmtree(os.path.join(project, 'out', 'scored'), ignore_errors=True)
    with monkeypatch.context() as patch:
        patch.setattr(measure, 'sum_of_losses', score_and_signal)
        run = train(project, '--out_dir=out/scored')
    assert run.code == 128 + by and run.err == '' and 'done' not in run.out
    assert run.out.endswith('stopped at step 30 and saved; the same command with --init_from=resume goes on\n')
    assert len(calls) == (4 if scoring == 'last windows' else 5)
    trained(project, '--out_dir=out/scored', '--init_from=resume')
    assert not differences_of_runs(project, 'whole', 'scored')


def test_ctrl_c_twice_while_saving_is_no_failed_write(project):
    """The second one ends the script at once; what was saved before stays, and is gone on from."""
    write(os.path.join(project, 'hasty.py'), '''import os, runpy, signal, sys, torch
calls, save = [], torch.save
class Hasty:
    def __init__(self, file): self.file = file
    def write(self, content):
        for _ in range(2): os.kill(os.getpid(), signal.SIGINT)
        return self.file.write(content)
    def flush(self): self.file.flush()
def save_hastily(state, file):
    calls.append(file)
    save(state, file if len(calls) < 4 else Hasty(file))            # ckpt.pt and last.pt at steps 0 and 10
torch.save, sys.argv[0] = save_hastily, "train.py"
runpy.run_path("train.py", run_name="__main__")
''')
    done = command(project, os.path.join(project, 'hasty.py'), *TINY, '--out_dir=out/hasty')
    assert (done.code, done.err) == (128 + signal.SIGINT, '')
    assert state(project, 'hasty')['iter_num'] == 0
    trained(project, '--out_dir=out/hasty', '--init_from=resume')
    assert not differences_of_runs(project, 'whole', 'hasty')


@pytest.mark.parametrize('reader', ['a pipe that nobody reads', 'a full disk'])
def test_training_goes_on_unheard(reader, project):
    """`python train.py | head` and the like: the run does not end for want of a listener."""
    if reader == 'a full disk':
        output = os.open('/dev/full', os.O_WRONLY)
    else:
        end, output = os.pipe()
        os.close(end)
    process = train_here(project, '--out_dir=out/unheard', '--overwrite', stdout=output)
    os.close(output)
    assert process.communicate(timeout=60)[1] == '' and process.returncode == 0
    assert not differences_of_runs(project, 'whole', 'unheard')


@pytest.mark.parametrize('fault, status, words', [
    ('torch.OutOfMemoryError("CUDA out of memory")', 2, ['not enough memory', 'smaller batch_size']),
    ('RuntimeError("DefaultCPUAllocator: can\'t allocate memory")', 2, ['not enough memory', 'smaller batch_size']),
    ('MemoryError', 2, ['not enough memory', 'smaller batch_size']),
    ('numpy._core._exceptions._ArrayMemoryError((50000, 1025), numpy.dtype(int))', 2, ['not enough memory', 'smaller batch_size']),
    ('RuntimeError("std::bad_alloc")', 2, ['not enough memory', 'smaller batch_size']),
    ('OSError(12, "Cannot allocate memory")', 2, ['not enough memory', 'smaller batch_size']),
    ('KeyboardInterrupt', -signal.SIGINT, ['stopped']),
])
def test_what_can_happen_at_any_moment_gets_one_line(fault, status, words, project):
    write(os.path.join(project, 'faulty.py'), 'import numpy, runpy, sys, torch\n'
          f'def clip(*arguments, **options): raise {fault}\n'
          'torch.nn.utils.clip_grad_norm_ = clip\nsys.argv[0] = "train.py"\nrunpy.run_path("train.py", run_name="__main__")\n')
    done = command(project, os.path.join(project, 'faulty.py'), *TINY, '--out_dir=out/spent', '--overwrite')
    assert done.code == status, done.err
    assert_one_line(done.err, *words)


# ----------------------------------------------------------------------------------------------------------------------
# full disks

@pytest.mark.skipif(not os.path.exists('/proc/self/fd'), reason='which file is open is read from /proc')
@pytest.mark.parametrize('file', ['ckpt.pt', 'last.pt', 'log.csv'])
def test_disk_full_while_saving_each_file(file, project, monkeypatch):
    """The second time that `file` is flushed, the disk is full."""
    folder, before, calls = os.path.join(project, 'out', 'full'), {}, []

    def flush(number):
        if os.path.basename(os.readlink(f'/proc/self/fd/{number}')).startswith(file):
            calls.append(number)
            if len(calls) == 2:
                before.update({name: content for name, content in contents(folder).items() if not name.endswith('.part')})
                raise OSError(errno.ENOSPC, 'as the system says it')

    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', flush)
        run = train(project, '--out_dir=out/full')
    assert_refused(run, os.path.join('out', 'full', file), 'No space left on device', 'then resume')
    assert contents(folder) == before
    trained(project, '--out_dir=out/full', '--init_from=resume')
    assert not differences_of_runs(project, 'whole', 'full')
    shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------------------------------------
# damaged files

def damage(path, how):
    content = bytearray(read(path))
    middle = len(content) // 2
    content[middle] ^= how == 'flipped'                 # one bit: of a checkpoint, in a weight
    write(path, {'cut': content[:middle], 'empty': b'', 'flipped': content}[how])


@pytest.mark.parametrize('how', ['cut', 'empty', 'flipped'])
@pytest.mark.parametrize('file, other', [('last.pt', 'ckpt.pt'), ('ckpt.pt', 'last.pt')])
def test_a_damaged_checkpoint_is_named_and_the_other_one_serves(file, other, how, project, spoilt):
    damage(os.path.join(spoilt, file), how)
    before = contents(spoilt)
    flags = ['--out_dir=out/spoilt', '--init_from=resume', '--max_iters=35', '--lr_decay_iters=30']
    assert_refused(train(project, *flags), f'out/spoilt/{file}', 'damaged', f'delete it: resuming then goes on from out/spoilt/{other}')
    assert contents(spoilt) == before
    os.remove(os.path.join(spoilt, file))
    trained(project, *flags)
    assert state(project, 'spoilt')['iter_num'] == 35 and os.path.exists(os.path.join(spoilt, 'ckpt.pt'))


def test_no_bit_can_flip_unseen(project, capsys):
    """A checkpoint with a single bit changed is either refused, in one line, or read as what it was."""
    original = os.path.join(project, 'out', 'whole', 'last.pt')
    expected, path, chance, refused = load_checkpoint(original), os.path.join(project, 'flipped.pt'), random.Random(0), 0
    content = read(original)
    for _ in range(200):
        place = chance.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        write(path, flipped)
        try:
            assert not differences(load_checkpoint(path), expected), f'byte {place}'
        except SystemExit as stop:
            assert stop.code == 2
            assert_one_line(capsys.readouterr().err, 'flipped.pt')
            refused += 1
    assert refused > 100


def test_a_damaged_log_is_written_anew(project, spoilt):
    """log.csv is what a run shows, not what it knows: the rows are in last.pt."""
    damage(os.path.join(spoilt, 'log.csv'), 'cut')
    trained(project, '--out_dir=out/spoilt', '--init_from=resume')
    assert not differences_of_runs(project, 'whole', 'spoilt')


@pytest.mark.parametrize('how', ['cut', 'empty', 'flipped'])
@pytest.mark.parametrize('file', ['train.bin', 'val.bin'])
def test_damaged_data_are_named(file, how, project):
    """test_data.py has what can befall meta.json."""
    path = os.path.join(project, 'data', 'tiny', file)
    kept = read(path)
    damage(path, how)
    try:
        run = train(project, '--out_dir=out/nothing')
    finally:
        write(path, kept)
    assert_refused(run, os.path.join('data', 'tiny', file), 'prepare.py')
    assert not os.path.exists(os.path.join(project, 'out', 'nothing'))


# ----------------------------------------------------------------------------------------------------------------------
# numbers that are none

def test_an_infinite_loss_stops_the_run(project):
    """Weights that grow ten thousandfold a step: the last evaluation's state is kept, finite, and training can start from it."""
    run = train(project, '--out_dir=out/diverged', '--learning_rate=100', '--weight_decay=100', '--decay_lr=False', '--eval_interval=2')
    assert_refused(run, ' at step ', os.path.join('out', 'diverged', 'last.pt') + ' holds the last good state', 'lower the learning rate')
    step = int(run.err.split(' at step ')[1].split(';')[0])
    kept = state(project, 'diverged')
    assert kept['iter_num'] <= step < 20
    assert all(tensor.isfinite().all() for tensor in kept['model'].values())
    assert all(float('-inf') < row[5] < float('inf') for row in kept['log'])
    trained(project, '--init_from=out/diverged', '--out_dir=out/started_again')


@pytest.fixture(scope='module')
def late(project):
    """train.py as it is on a GPU, which is not waited for at each step: losses and norms are read some steps late."""
    path = os.path.join(project, 'late.py')
    text = read(os.path.join(ROOT, 'train.py')).decode()
    assert text.count("device.type == 'cpu' or ") == 1
    write(path, text.replace("device.type == 'cpu' or ", ''))
    return path


def test_losses_that_are_read_late_are_the_same(late, project):
    ran(project, late, *TINY, '--out_dir=out/late', '--eval_interval=8', '--log_interval=7')
    trained(project, '--out_dir=out/early', '--eval_interval=8', '--log_interval=7')
    assert not differences_of_runs(project, 'early', 'late')


@pytest.mark.parametrize('what', ['loss', 'norm'])
def test_nan_that_is_read_late_is_never_saved(what, late, project, monkeypatch):
    def step(model, *arguments):
        numbers = dict(zip(('loss', 'norm'), training_step(model, *arguments)))
        calls.append(None)
        if len(calls) == 13:                                                # step 12, between two evaluations: all is lost
            numbers[what] *= float('nan')
            next(model.parameters()).data.fill_(float('nan'))
        return tuple(numbers.values())

    training_step, calls = measure.training_step, []
    with monkeypatch.context() as patch:
        patch.setattr(measure, 'training_step', step)
        stopped = run(project, late, *TINY, f'--out_dir=out/late_{what}')
    assert_refused(stopped, 'nan at step 12;', 'last.pt holds the last good state')
    assert len(calls) == 20 and state(project, f'late_{what}')['iter_num'] == 10
    trained(project, f'--out_dir=out/late_{what}', '--init_from=resume')
    assert not differences_of_runs(project, 'whole', f'late_{what}')


@pytest.mark.parametrize('what, words', [('loss', 'the loss is nan at step 12;'), ('gradient', 'gradient is nan at step 12;')])
def test_nan_stops_the_run_before_its_step(what, words, project, monkeypatch):
    clip, cross_entropy, calls = torch.nn.utils.clip_grad_norm_, torch.nn.functional.cross_entropy, []

    def nan_norm(parameters, *options):
        calls.append(None)
        return clip(parameters, *options) * (float('nan') if len(calls) == 13 else 1)

    def nan_loss(logits, *arguments, **options):
        calls.extend([None] * logits.requires_grad)     # evaluations don't count
        return cross_entropy(logits, *arguments, **options) * (float('nan') if len(calls) == 13 and logits.requires_grad else 1)

    with monkeypatch.context() as patch:
        if what == 'loss':
            patch.setattr(torch.nn.functional, 'cross_entropy', nan_loss)
        else:
            patch.setattr(torch.nn.utils, 'clip_grad_norm_', nan_norm)
        run = train(project, f'--out_dir=out/{what}')
    assert_refused(run, words)
    assert state(project, what)['iter_num'] == 10
    trained(project, f'--out_dir=out/{what}', '--init_from=resume')     # a passing fault, unlike a learning rate: it can go on
    assert not differences_of_runs(project, 'whole', what)
    assert read_log(project, what)[-1][0] == 30
