"""
The folders of runs and of data: what is there of another origin stays, each has one writer, what was moved is found, and a run keeps what
it began with, until there is something better.
"""
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

import measure
from harness import (TINY, assert_one_line, assert_refused, at_step, command, contents, differences_of_runs, make_data, make_project, read,
                     read_log, run, start, state, train, trained, tree, write)
from runs import FILES


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A project, with the runs out/whole, of 30 steps, and out/other, of another seed and scheme."""
    folder = make_project(tmp_path_factory.mktemp('project'))
    trained(folder, '--out_dir=out/whole')
    trained(folder, '--out_dir=out/other', '--seed=5', '--position=rope')
    return folder


@pytest.fixture
def folder(project):
    """The run folder out/new, which is not there yet."""
    path = os.path.join(project, 'out', 'new')
    shutil.rmtree(path, ignore_errors=True)
    return path


@pytest.fixture
def old(project, folder):
    """The same with a copy of out/other in it, and a picture."""
    shutil.copytree(os.path.join(project, 'out', 'other'), folder)
    write(os.path.join(folder, 'loss.png'), 'a picture')
    return folder


NEW = '--out_dir=out/new'
OTHER = [NEW, '--seed=5', '--position=rope']


# ----------------------------------------------------------------------------------------------------------------------
# what is of another origin

@pytest.mark.parametrize('flag', ['--overwrite=False', '--overwrite=True'])
@pytest.mark.parametrize('files', [[file] for file in FILES] + [['config.json', 'log.csv'], ['config.json', 'last.pt']])
def test_foreign_files_are_never_replaced(files, flag, project, folder):
    for file in files:
        write(os.path.join(folder, file), '{"mine": 1}')
    before = contents(folder)
    assert_refused(train(project, NEW, flag), 'out/new', files[0], '--out_dir')
    assert contents(folder) == before


def test_the_checkpoint_of_another_program_is_foreign(project, folder):
    source = state(project, 'whole', 'ckpt.pt')
    os.makedirs(folder)
    torch.save({'model': source['model'], 'model_args': source['model_args']}, os.path.join(folder, 'ckpt.pt'))      # as nanoGPT's
    before = contents(folder)
    assert_refused(train(project, NEW, '--overwrite'), 'ckpt.pt of another origin', 'move that away')
    assert contents(folder) == before


@pytest.mark.parametrize('file', FILES)
def test_a_directory_in_a_files_place_is_one_line(file, project, folder):
    os.makedirs(os.path.join(folder, file))
    assert_refused(train(project, NEW, '--overwrite'), f'out/new/{file} is a directory', 'move it away')
    if not file.endswith('.pt'):
        os.rmdir(os.path.join(folder, file))
        trained(project, NEW, '--max_iters=10')
        if os.path.exists(os.path.join(folder, file)):
            os.remove(os.path.join(folder, file))
        os.makedirs(os.path.join(folder, file))
        assert_refused(train(project, NEW, '--init_from=resume'), f'out/new/{file} is a directory', 'move it away')


def test_parts_of_a_run_are_replaced_only_if_asked_for(project, old):
    for file in ('last.pt', 'ckpt.pt'):
        os.remove(os.path.join(old, file))
    refused = train(project, NEW)
    assert_refused(refused, 'already holds a run', '--overwrite=True')
    assert 'resume' not in refused.err                                      # which would be refused too
    trained(project, NEW, '--overwrite')
    os.remove(os.path.join(old, 'config.json'))
    assert_refused(train(project, NEW), 'already holds a run', '--overwrite=True')
    trained(project, NEW, '--overwrite')
    assert not differences_of_runs(project, 'whole', 'new')


# ----------------------------------------------------------------------------------------------------------------------
# one writer

def test_a_folder_has_one_writer_and_a_kill_frees_it(project, folder):
    flags = [*TINY, NEW, '--max_iters=1000000', '--eval_interval=1000000']
    process = start(project, os.path.join(project, 'train.py'), *flags)
    try:
        while not os.path.exists(os.path.join(folder, 'config.json')):
            assert process.poll() is None
            time.sleep(0.05)
        for flag in ('--init_from=resume', '--overwrite'):
            refused = run(project, 'train.py', *flags, flag)
            assert_refused(refused, 'another process is writing to out/new', 'another --out_dir')
        assert run(project, 'train.py', *flags, '--init_from=resume', '--eval_only').code == 0      # which only reads
    finally:
        process.kill()
        process.communicate()
    trained(project, NEW, '--init_from=resume', '--max_iters=10', '--lr_decay_iters=10')


def test_of_two_runs_that_start_at_once_one_is_whole(project, folder):
    both = [start(project, os.path.join(project, 'train.py'), *TINY, NEW) for _ in range(2)]
    errors = [process.communicate(timeout=100)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    assert_one_line(errors[codes.index(2)], 'out/new', '--out_dir')
    assert not differences_of_runs(project, 'whole', 'new')


# ----------------------------------------------------------------------------------------------------------------------
# --overwrite: the old run stays until the first checkpoint of the new one is whole

class Killed(BaseException):
    """Stands for SIGKILL: nobody catches it."""


@pytest.mark.parametrize('files', range(7))
def test_killed_while_it_replaces_a_run(files, project, old, monkeypatch):
    """After so many files there is the old run or the new one to go on with, and it comes to what it would have."""
    replace, replaced, before = os.replace, [], contents(old)

    def replace_or_die(part, path):
        if len(replaced) == files:
            raise Killed
        replace(part, path)
        replaced.append(path)

    monkeypatch.setattr(os, 'fsync', lambda file: None)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, 'replace', replace_or_die)
        train(project, NEW, '--overwrite')
    if files == 0:
        assert {**before, **contents(old)} == before                        # but config.json, which resuming writes again
        trained(project, *OTHER, '--init_from=resume')
    else:
        trained(project, NEW, '--init_from=resume')
    assert not differences_of_runs(project, 'whole' if files else 'other', 'new')
    assert os.path.exists(os.path.join(old, 'config.json'))


@pytest.mark.parametrize('source', ['scratch', 'out/new'])
@pytest.mark.parametrize('fault', ['nan', 'full disk', 'kill'])
def test_a_fault_before_the_first_checkpoint_leaves_the_old_run(fault, source, project, old, monkeypatch):
    def full_disk(file):
        raise OSError(28, 'No space left on device')

    def kill(*arguments):
        raise Killed

    before = contents(old)
    flags = [*OTHER, '--overwrite', f'--init_from={source}']
    with monkeypatch.context() as patch:
        if fault == 'nan':
            patch.setattr(measure, 'sum_of_losses', lambda *arguments: (float('nan'), 1))
            result = train(project, *flags)
            assert_refused(result, 'nan at step 0')
            assert 'last good state' not in result.err
        elif fault == 'full disk':
            patch.setattr(os, 'fsync', full_disk)
            assert_refused(train(project, *flags), 'No space left', 'what was there before is whole')
        else:
            patch.setattr(measure, 'sum_of_losses', kill)
            with pytest.raises(Killed):
                train(project, *flags)
    assert contents(old) == before
    trained(project, *flags)
    assert state(project, 'new')['config']['init_from'] == source and 'loss.png' not in os.listdir(old)
    assert read_log(project, 'new')[-1][0] == 30


# ----------------------------------------------------------------------------------------------------------------------
# what was renamed or moved

def test_what_was_renamed_is_named_or_goes_on(project, tmp_path):
    project = make_project(tmp_path, files=False)
    trained(project, '--out_dir=out/first', '--max_iters=10', '--lr_decay_iters=30')
    trained(project, '--out_dir=out/unbroken')
    os.rename(os.path.join(project, 'out', 'first'), os.path.join(project, 'out', 'renamed'))
    data = os.path.join(project, 'data')
    os.rename(os.path.join(data, 'tiny'), os.path.join(data, 'mine'))
    flags = [flag for flag in TINY if 'dataset' not in flag] + ['--out_dir=out/renamed', '--init_from=resume']
    for more in ([], ['--dataset=tiny'], ['--dataset=nowhere']):
        assert_refused(run(project, 'train.py', *flags, *more), 'out/renamed', 'in mine; add --dataset=mine')
    assert run(project, 'train.py', *flags, '--dataset=mine').code == 0
    assert [found for found in differences_of_runs(project, 'unbroken', 'renamed') if 'dataset' not in found and 'lr_decay' not in found] == []
    # compare.py finds it by itself; others of the same name are none
    assert run(project, 'compare.py', 'out/unbroken', '--longest=1', '--sweep_tokens=64').code == 0
    make_data(os.path.join(data, 'tiny'), read(os.path.join(data, 'mine', 'input.txt')).decode()[500:], 19000)
    flags[-2] = '--out_dir=out/unbroken'
    assert_refused(run(project, 'train.py', *flags), 'add --dataset=mine')
    shutil.rmtree(os.path.join(data, 'mine'))
    assert_refused(run(project, 'train.py', *flags), 'tiny has been prepared anew', 'prepare that one')


def test_a_renamed_file_of_a_run_is_named(project, old):
    os.remove(os.path.join(old, 'ckpt.pt'))
    os.rename(os.path.join(old, 'last.pt'), os.path.join(old, 'good.pt'))
    assert_refused(run(project, 'sample.py', 'out/new'), 'no checkpoint', 'out/new/good.pt')
    assert_refused(train(project, *OTHER, '--init_from=resume'), 'out/new/good.pt', 'call it last.pt')
    os.rename(os.path.join(old, 'good.pt'), os.path.join(old, 'last.pt'))
    os.rename(os.path.join(old, 'config.json'), os.path.join(old, 'settings.json'))
    assert_refused(run(project, 'compare.py', 'out/new'), 'no config.json', '--out_dir=out/new --init_from=resume')
    trained(project, *OTHER, '--init_from=resume')
    assert os.path.exists(os.path.join(old, 'config.json'))


def test_a_checkout_that_cannot_be_written_to_trains_on_data_elsewhere(project, tmp_path):
    checkout = make_project(tmp_path / 'checkout')
    os.rename(os.path.join(checkout, 'data', 'tiny'), tmp_path / 'tiny')
    for parent, folders, files in os.walk(checkout):
        for name in [*folders, *files]:
            os.chmod(os.path.join(parent, name), 0o555)
    os.chmod(checkout, 0o555)
    before = tree(checkout)
    done = command(tmp_path, os.path.join(checkout, 'train.py'), *TINY, f'--dataset={tmp_path}/tiny', '--out_dir=run',
                   env={'PYTHONDONTWRITEBYTECODE': '1'})
    os.chmod(checkout, 0o755)
    assert done.code == 0, done.err
    assert {**tree(checkout), checkout: 0} == {**before, checkout: 0}         # where nothing keeps root from writing
    assert os.path.exists(tmp_path / 'run' / 'last.pt')


# ----------------------------------------------------------------------------------------------------------------------
# data that change under a run

@pytest.mark.parametrize('kept', ['in memory', 'on disk'])
def test_a_run_keeps_the_data_that_it_began_with(kept, project, folder, monkeypatch):
    data = os.path.join(project, 'data', 'tiny')
    shutil.copytree(data, data + '_before')
    monkeypatch.setattr(measure, 'MOST_KEPT', 0 if kept == 'on disk' else measure.MOST_KEPT)
    try:
        with at_step(7, lambda: make_data(data, 'entirely another text. ' * 1000, 20000), monkeypatch):
            trained(project, NEW)
    finally:
        shutil.rmtree(data)
        os.rename(data + '_before', data)
    assert not differences_of_runs(project, 'whole', 'new')


@pytest.mark.parametrize('how', ['other ids', 'cut'])
def test_data_that_are_written_to_in_place_stop_the_run(how, project, folder, monkeypatch):
    path = os.path.join(project, 'data', 'tiny', 'train.bin')
    kept = read(path)
    monkeypatch.setattr(measure, 'MOST_KEPT', 0)
    try:
        with at_step(12, lambda: write(path, kept[::-1] if how == 'other ids' else kept[:100]), monkeypatch):
            assert_refused(train(project, NEW), 'train.bin was written to', 'then resume')
    finally:
        write(path, kept)
    assert state(project, 'new')['iter_num'] == 10
    trained(project, NEW, '--init_from=resume')
    assert not differences_of_runs(project, 'whole', 'new')


# ----------------------------------------------------------------------------------------------------------------------
# threads, and preparing

def test_other_threads_are_said_once(project, folder):
    trained(project, NEW, '--max_iters=10')
    assert 'threads' not in trained(project, NEW, '--init_from=resume', '--max_iters=12').out
    for words in (True, False):
        flags = [*TINY, NEW, '--init_from=resume', f'--max_iters={20 - 2 * words}']
        done = command(project, os.path.join(project, 'train.py'), *flags, env={'OMP_NUM_THREADS': '2'})
        assert done.code == 0 and ('2 threads, where the run had 1' in done.out) == words
        assert ('OMP_NUM_THREADS=1' in done.out) == words


def test_first_runs_at_once_prepare_once(tmp_path):
    project = make_project(tmp_path)
    write(os.path.join(project, 'data', 'word_order', 'prepare.py'), '''import os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, '..', '..'))
from dataset import CharTokenizer, write_dataset
print('preparing', flush=True)
time.sleep(1)
write_dataset(here, 'a text ' * 100, 'a text ' * 20, CharTokenizer('a text '), 'made up')
''')
    code = 'from dataset import Dataset, prepare_if_missing; Dataset(prepare_if_missing("word_order"))'
    several = [subprocess.Popen([sys.executable, '-c', code], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for _ in range(4)]
    results = [process.communicate(timeout=100) for process in several]
    assert [process.returncode for process in several] == 4 * [0], results
    assert sum(out.count('preparing') for out, _ in results) == 1 and not any(err for _, err in results)


def test_what_a_kill_left_half_written_goes_when_the_data_are_prepared_again(tmp_path):
    for file in ('train.bin.123.part', 'meta.json.4.part', 'train.bin.mine.part'):
        write(tmp_path / file, 'x')
    make_data(str(tmp_path), 'a text ' * 100, 500)
    assert sorted(os.listdir(tmp_path)) == ['input.txt', 'meta.json', 'train.bin', 'train.bin.mine.part', 'val.bin']
