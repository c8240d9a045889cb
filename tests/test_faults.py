"""Kills, signals, full disks, damaged files, numbers that overflow: no run is lost, and one line says what happened and what to do."""
import errno
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import runs
from runs import load_checkpoint
from tiny_runs import (TINY, assert_refused, at_step, differences, make_project, read_log, state, train, train_command, trained,
                       without_times)

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A project, with a run out/whole of 30 steps that nothing happened to."""
    folder = make_project(tmp_path_factory.mktemp('project'))
    trained(folder, '--out_dir=out/whole')
    return folder


def assert_as_whole(project, name, whole='whole'):
    """The run out/<name> ended as out/<whole> did."""
    assert not differences(state(project, whole), state(project, name))
    assert not differences(state(project, whole, 'ckpt.pt'), state(project, name, 'ckpt.pt'))
    assert without_times(read_log(project, whole)) == without_times(read_log(project, name))


def contents(folder):
    found = {}
    for file in os.listdir(folder):
        with open(os.path.join(folder, file), 'rb') as opened:
            found[file] = opened.read()
    return found


# ----------------------------------------------------------------------------------------------------------------------
# kills and signals

def test_killed_at_random_moments():
    """The short form of kill_training.py; 200 kills are for doing by hand."""
    done = subprocess.run([sys.executable, os.path.join(HERE, 'kill_training.py'), '--kills=4'], capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout + done.stderr
    assert '4 kills in' in done.stdout and 'no run was lost' in done.stdout


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
    for dies_after in range(1, 14):
        replaced.clear()
        monkeypatch.setattr(os, 'replace', replace_and_die)
        with pytest.raises(Killed):
            train(project, '--out_dir=out/killed')
        monkeypatch.setattr(os, 'replace', replace)
        folder = os.path.join(project, 'out', 'killed')
        begun = {'ckpt.pt', 'last.pt'} & set(os.listdir(folder))
        trained(project, '--out_dir=out/killed', *(['--init_from=resume'] if begun else []))
        assert_as_whole(project, 'killed')
        shutil.rmtree(folder)
    # config.json; ckpt.pt, last.pt and log.csv at steps 0, 10 and 20; ckpt.pt, last.pt and log.csv at the end
    assert replaced == ['config.json'] + 4 * ['ckpt.pt', 'last.pt', 'log.csv']


def test_ctrl_c_saves_and_says_how_to_go_on(project):
    """The real command. (tests/test_resume.py has SIGTERM, tests/test_processes.py torchrun.)"""
    command = [*TINY, '--out_dir=out/interrupted', '--max_iters=1000000', '--eval_interval=1000000']
    run = train_command(project, *command)
    lines = iter(run.stdout.readline, '')
    assert any(line.startswith('step 0') for line in lines)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT and err == ''
    steps = state(project, 'interrupted')['iter_num']
    assert out == f'stopped at step {steps} and saved; the same command with --init_from=resume goes on\n'
    run = trained(project, *command, '--init_from=resume', f'--max_iters={steps + 5}')
    assert f'going on from step {steps:,}' in run.out and state(project, 'interrupted')['iter_num'] == steps + 5


@pytest.mark.parametrize('reader', ['a pipe that nobody reads', 'a full disk'])
def test_training_goes_on_unheard(reader, project):
    """`python train.py | head` and the like: the run does not end for want of a listener."""
    if reader == 'a full disk':
        output = os.open('/dev/full', os.O_WRONLY)
    else:
        end, output = os.pipe()
        os.close(end)
    done = subprocess.run([sys.executable, os.path.join(project, 'train.py'), *TINY, '--out_dir=out/unheard', '--overwrite'], cwd=project,
                          env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}, stdout=output, stderr=subprocess.PIPE)
    os.close(output)
    assert (done.returncode, done.stderr) == (0, b'')
    assert_as_whole(project, 'unheard')


@pytest.mark.parametrize('fault, status, words', [
    ('torch.OutOfMemoryError("CUDA out of memory")', 2, ['not enough memory', 'smaller batch_size']),
    ('RuntimeError("DefaultCPUAllocator: can\'t allocate memory")', 2, ['not enough memory', 'smaller batch_size']),
    ('KeyboardInterrupt', -signal.SIGINT, ['stopped']),
])
def test_what_can_happen_at_any_moment_gets_one_line(fault, status, words, project):
    code = ('import runpy, sys, torch\ndef clip(*arguments, **options): raise ' + fault + '\ntorch.nn.utils.clip_grad_norm_ = clip\n'
            'sys.path.insert(0, "."); sys.argv[0] = "train.py"; runpy.run_path("train.py", run_name="__main__")')
    done = subprocess.run([sys.executable, '-c', code, *TINY, '--out_dir=out/spent', '--overwrite'], cwd=project, capture_output=True,
                          text=True, env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'})
    assert done.returncode == status and len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# full disks

@pytest.fixture
def small_disk(project):
    """A disk of 4 MB, mounted as the project's out/small; skips where that is not allowed."""
    folder = os.path.join(project, 'out', 'small')
    os.makedirs(folder)
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', folder], capture_output=True).returncode != 0:
        pytest.skip('mounting a small disk takes root')
    yield folder
    subprocess.run(['umount', folder])


def test_disk_full_while_saving(project, small_disk, monkeypatch):
    filler, wider = os.path.join(small_disk, 'filler'), '--n_embd=64'           # tensors that no buffer holds: see write_whole
    trained(project, wider, '--out_dir=out/large')

    def fill_the_disk():
        before.update(contents(small_disk))
        with open(filler, 'wb', buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        with open(filler, 'r+b') as file:               # room for a piece of a checkpoint
            file.truncate(os.path.getsize(filler) - 50000)

    for step in (15, 25):                               # before the evaluation at step 20, and before the end
        before = {}
        with at_step(step % 20, fill_the_disk, monkeypatch):
            run = train(project, wider, '--out_dir=out/small', *(['--init_from=resume'] if step > 15 else []))
        assert_refused(run, os.path.join('out', 'small'), 'could not be written (No space left on device)', 'free some space')
        os.remove(filler)
        assert contents(small_disk) == before and set(before) == {'ckpt.pt', 'last.pt', 'log.csv', 'config.json'}
    trained(project, wider, '--out_dir=out/small', '--init_from=resume')
    assert_as_whole(project, 'small', whole='large')


@pytest.mark.parametrize('file', ['ckpt.pt', 'last.pt', 'log.csv'])
def test_disk_full_while_saving_each_file(file, project, monkeypatch):
    """The same with a fake, which needs no root: the second time that `file` is flushed, the disk is full."""
    write_whole, fsync, calls = runs.write_whole, os.fsync, []

    def write_on_full_disk(path, write):
        calls.append(os.path.basename(path))
        full = calls.count(file) == 2 and calls[-1] == file
        if full:
            before.update(contents(os.path.dirname(path)))
        with monkeypatch.context() as patch:
            if full:
                patch.setattr(os, 'fsync', no_space)
            write_whole(path, write)

    def no_space(_):
        raise OSError(errno.ENOSPC, 'as the system says it')

    before, folder = {}, os.path.join(project, 'out', 'full')
    with monkeypatch.context() as patch:
        patch.setattr(runs, 'write_whole', write_on_full_disk)
        run = train(project, '--out_dir=out/full')
    assert_refused(run, os.path.join('out', 'full', file), 'could not be written (No space left on device)', 'then resume')
    assert contents(folder) == before
    trained(project, '--out_dir=out/full', '--init_from=resume')
    assert_as_whole(project, 'full')
    shutil.rmtree(folder)


def test_a_folder_that_cannot_be_made(project):
    with open(os.path.join(project, 'file'), 'w'):
        pass
    assert_refused(train(project, '--out_dir=file/run'), 'nothing can be written to file/run', 'is a file', 'another folder')


# ----------------------------------------------------------------------------------------------------------------------
# damaged files

def damage(path, how):
    with open(path, 'rb') as file:
        content = bytearray(file.read())
    if how == 'cut':
        content = content[:len(content) // 2]
    elif how == 'empty':
        content = b''
    elif how == 'flipped':                              # one bit, in the middle: of a checkpoint, in a weight
        content[len(content) // 2] ^= 1
    with open(path, 'wb') as file:
        file.write(content)


@pytest.mark.parametrize('how', ['cut', 'empty', 'flipped'])
@pytest.mark.parametrize('file', ['last.pt', 'ckpt.pt'])
def test_a_damaged_checkpoint_is_named_and_the_other_one_serves(file, how, project):
    folder = os.path.join(project, 'out', 'damaged')
    shutil.copytree(os.path.join(project, 'out', 'whole'), folder)
    damage(os.path.join(folder, file), how)
    before = contents(folder)
    other = {'last.pt': 'ckpt.pt', 'ckpt.pt': 'last.pt'}[file]
    flags = ['--out_dir=out/damaged', '--init_from=resume', '--max_iters=35', '--lr_decay_iters=30']
    run = train(project, *flags)
    assert_refused(run, os.path.join('out', 'damaged', file), 'damaged', f'delete it: resuming then goes on from out/damaged/{other}')
    assert contents(folder) == before
    os.remove(os.path.join(folder, file))
    trained(project, *flags)
    assert state(project, 'damaged')['iter_num'] == 35 and os.path.exists(os.path.join(folder, 'ckpt.pt'))
    shutil.rmtree(folder)


def test_no_bit_can_flip_unseen(project, capsys):
    """A checkpoint with a single bit changed is either refused, in one line, or read as what it was."""
    original = os.path.join(project, 'out', 'whole', 'last.pt')
    expected, path, chance, refused = load_checkpoint(original), os.path.join(project, 'flipped.pt'), random.Random(0), 0
    with open(original, 'rb') as file:
        content = file.read()
    for _ in range(200):
        place = chance.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        with open(path, 'wb') as file:
            file.write(flipped)
        try:
            assert not differences(load_checkpoint(path), expected), f'byte {place}'
        except SystemExit as stop:
            assert stop.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
            refused += 1
    assert refused > 100


def test_a_damaged_log_is_written_anew(project):
    """log.csv is what a run shows, not what it knows: the rows are in last.pt."""
    shutil.copytree(os.path.join(project, 'out', 'whole'), os.path.join(project, 'out', 'log'))
    damage(os.path.join(project, 'out', 'log', 'log.csv'), 'cut')
    trained(project, '--out_dir=out/log', '--init_from=resume')
    assert_as_whole(project, 'log')


@pytest.mark.parametrize('how', ['cut', 'empty', 'flipped'])
@pytest.mark.parametrize('file', ['train.bin', 'val.bin', 'meta.json'])
def test_damaged_data_are_named(file, how, project):
    path = os.path.join(project, 'data', 'tiny', file)
    shutil.copy(path, path + '.kept')
    damage(path, how)
    try:
        if file == 'meta.json' and how == 'flipped':    # an arbitrary entry: change one that counts
            shutil.copy(path + '.kept', path)
            with open(path, encoding='utf-8') as opened:
                text = opened.read()
            with open(path, 'w', encoding='utf-8') as opened:
                opened.write(text.replace('"train_tokens": 20000', '"train_tokens": 20008'))
        run = train(project, '--out_dir=out/nothing')
    finally:
        os.replace(path + '.kept', path)
    assert_refused(run, os.path.join('data', 'tiny', 'train.bin' if how == 'flipped' and file == 'meta.json' else file), 'prepare.py')
    assert not os.path.exists(os.path.join(project, 'out', 'nothing'))


# ----------------------------------------------------------------------------------------------------------------------
# numbers that are none

def test_an_infinite_loss_stops_the_run(project):
    """Weights that grow ten thousandfold a step: the last evaluation's state is kept, finite, and training can start from it."""
    run = train(project, '--out_dir=out/diverged', '--learning_rate=100', '--weight_decay=100', '--decay_lr=False',
                '--eval_interval=2')
    assert_refused(run, ' at step ', os.path.join('out', 'diverged', 'last.pt') + ' holds the last good state', 'lower the learning rate')
    step = int(run.err.split(' at step ')[1].split(';')[0])
    kept = state(project, 'diverged')
    assert kept['iter_num'] <= step < 20
    assert all(tensor.isfinite().all() for tensor in kept['model'].values())
    assert all(float('-inf') < row[5] < float('inf') for row in kept['log'])
    trained(project, '--init_from=out/diverged', '--out_dir=out/started_again')


@pytest.mark.parametrize('what', ['the loss', 'the gradient'])
def test_nan_stops_the_run_before_its_step(what, project, monkeypatch):
    clip, cross_entropy, calls = torch.nn.utils.clip_grad_norm_, torch.nn.functional.cross_entropy, []

    def nan_norm(parameters, *options):
        calls.append(None)
        return clip(parameters, *options) * (float('nan') if len(calls) == 13 else 1)

    def nan_loss(logits, *arguments, **options):
        calls.extend([None] * logits.requires_grad)     # evaluations don't count
        return cross_entropy(logits, *arguments, **options) * (float('nan') if len(calls) == 13 and logits.requires_grad else 1)

    with monkeypatch.context() as patch:
        if what == 'the loss':
            patch.setattr(torch.nn.functional, 'cross_entropy', nan_loss)
        else:
            patch.setattr(torch.nn.utils, 'clip_grad_norm_', nan_norm)
        name = what.replace(' ', '_')
        run = train(project, f'--out_dir=out/{name}')
    assert_refused(run, ('the loss' if what == 'the loss' else "the norm of the loss's gradient") + ' is nan at step 12;')
    assert state(project, name)['iter_num'] == 10
    trained(project, f'--out_dir=out/{name}', '--init_from=resume')     # a passing fault, unlike a learning rate: it can go on
    assert_as_whole(project, name)
