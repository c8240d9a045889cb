"""--init_from=resume goes on as if nothing had happened: the same batches, learning rates, losses and weights, bit for bit."""
import os
import shutil
import signal

import pytest
import torch

from harness import (assert_refused, at_step, differences, differences_of_runs, make_data, make_project, read, read_log, state, train,
                     trained, without_times, write)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('project'), files=False)


@pytest.fixture
def tape(monkeypatch):
    """What the runs of a test did, step by step: the batches that they drew and the learning rates that AdamW used."""
    batches, rates, randint, step = [], [], torch.randint, torch.optim.AdamW.step

    def randint_and_record(*arguments, **options):
        result = randint(*arguments, **options)
        if 'generator' in options:
            batches.append(result.tolist())
        return result

    def step_and_record(self, *arguments, **options):
        rates.append(self.param_groups[0]['lr'])
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch, 'randint', randint_and_record)
    monkeypatch.setattr(torch.optim.AdamW, 'step', step_and_record)
    return batches, rates


def stop_at(number, project, *flags, monkeypatch, by=signal.SIGTERM):
    """A run that gets a signal in its step `number`, counted from 0, and so saves after number + 1 steps."""
    with at_step(number, lambda: os.kill(os.getpid(), by), monkeypatch):
        return train(project, *flags)


# ----------------------------------------------------------------------------------------------------------------------
# 200 = 120 + resume + 80

@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_200_steps_are_120_and_80(optimizer, project, tape, monkeypatch):
    batches, rates = tape
    flags = [f'--optimizer={optimizer}', '--position=shaw', '--dropout=0.1', '--gradient_accumulation_steps=2', '--batch_size=2',
             '--min_lr=1e-4', '--max_iters=200', '--eval_interval=40']
    whole, parts, longer = f'{optimizer}_whole', f'{optimizer}_parts', f'{optimizer}_longer'
    trained(project, *flags, f'--out_dir=out/{whole}')
    expected = batches[:], rates[:]
    assert len(expected[0]) == len(expected[1]) == 200

    # stopped after 110 steps, between two evaluations, and again after 130
    batches.clear(), rates.clear()
    run = stop_at(109, project, *flags, f'--out_dir=out/{parts}', monkeypatch=monkeypatch)
    assert run.code == 128 + signal.SIGTERM and 'stopped at step 110 and saved' in run.out and '--init_from=resume' in run.out
    run = stop_at(19, project, *flags, f'--out_dir=out/{parts}', '--init_from=resume', by=signal.SIGINT, monkeypatch=monkeypatch)
    assert run.code == 128 + signal.SIGINT and 'going on from step 110' in run.out and 'stopped at step 130 and saved' in run.out
    trained(project, *flags, f'--out_dir=out/{parts}', '--init_from=resume')
    assert (batches, rates) == expected
    assert not differences_of_runs(project, whole, parts)

    # a finished run of 120 steps on the schedule of 200, which then grows
    batches.clear(), rates.clear()
    flags.remove('--max_iters=200')
    run = trained(project, *flags, '--max_iters=120', '--lr_decay_iters=200', f'--out_dir=out/{longer}')
    assert 'done: ' in run.out and read_log(project, longer)[-1][0] == 120
    trained(project, *flags, f'--out_dir=out/{longer}', '--init_from=resume', '--max_iters=200')
    assert (batches, rates) == expected
    assert not differences(state(project, whole), state(project, longer))
    assert without_times(read_log(project, whole)) == without_times(read_log(project, longer))


def test_growing_keeps_the_schedule_unless_told_otherwise(project, tape):
    _, rates = tape
    flags = ['--out_dir=out/grown', '--min_lr=1e-3']
    trained(project, *flags, '--max_iters=20')
    shutil.copytree(os.path.join(project, 'out', 'grown'), os.path.join(project, 'out', 'stretched'))
    rates.clear()
    run = trained(project, *flags, '--init_from=resume', '--max_iters=25')
    assert rates == pytest.approx([1e-3] * 5)
    assert 'from step 20 on the learning rate is min_lr, 0.001; --lr_decay_iters=25 stretches its schedule' in run.out
    rates.clear()
    run = trained(project, '--out_dir=out/stretched', '--min_lr=1e-3', '--init_from=resume', '--max_iters=25', '--lr_decay_iters=25')
    assert rates[0] > 1.5e-3 and min(rates) >= 1e-3 and 'stretches' not in run.out


# ----------------------------------------------------------------------------------------------------------------------
# the edges

def test_a_finished_run_says_so_and_stays_as_it_is(project):
    trained(project, '--out_dir=out/finished')
    log, last, best = read_log(project, 'finished'), state(project, 'finished'), state(project, 'finished', 'ckpt.pt')
    run = trained(project, '--out_dir=out/finished', '--init_from=resume')
    assert 'has done all of its 30 steps; a larger --max_iters goes on' in run.out
    assert without_times(read_log(project, 'finished')) == without_times(log)
    assert not differences(state(project, 'finished'), last) and not differences(state(project, 'finished', 'ckpt.pt'), best)
    assert_refused(train(project, '--out_dir=out/finished', '--init_from=resume', '--max_iters=20'), '30 steps', 'max_iters 20', 'larger')


def test_before_the_first_checkpoint_there_is_no_run(project):
    folder = os.path.join(project, 'out', 'young')
    for file in ('config.json', 'ckpt.pt.123.part', 'log.csv.123.part', 'mine.txt'):     # killed while it wrote its first checkpoint
        write(os.path.join(folder, file), '{"settings": {}, "model_args": {}, "data": {}}')
    assert_refused(train(project, '--out_dir=out/young', '--init_from=resume'), 'out/young holds no run to resume', '--out_dir')
    trained(project, '--out_dir=out/young')
    assert sorted(os.listdir(folder)) == ['ckpt.pt', 'config.json', 'last.pt', 'log.csv', 'mine.txt']


def test_the_best_is_never_replaced_by_a_worse_one(project):
    """A kill between ckpt.pt and last.pt leaves ckpt.pt ahead; on a GPU the steps between may then come out a little worse."""
    trained(project, '--out_dir=out/ahead', '--max_iters=20')
    path = os.path.join(project, 'out', 'ahead', 'ckpt.pt')
    best = torch.load(path, weights_only=True)
    torch.save({**best, 'best_val_loss': 0.5, 'iter_num': 19}, path)
    trained(project, '--out_dir=out/ahead', '--init_from=resume', '--max_iters=30')
    assert state(project, 'ahead', 'ckpt.pt')['iter_num'] == 19 and state(project, 'ahead')['best_val_loss'] == 0.5
    # and if ckpt.pt is gone, the next evaluation makes one
    os.remove(path)
    trained(project, '--out_dir=out/ahead', '--init_from=resume', '--max_iters=40')
    assert state(project, 'ahead', 'ckpt.pt')['iter_num'] in (30, 40)


def test_without_last_pt_the_best_is_gone_on_from(project):
    trained(project, '--out_dir=out/whole')
    trained(project, '--out_dir=out/halved')
    os.remove(os.path.join(project, 'out', 'halved', 'last.pt'))
    trained(project, '--out_dir=out/halved', '--init_from=resume')
    assert not differences(state(project, 'whole'), state(project, 'halved'))


def test_another_run_is_refused(project):
    trained(project, '--out_dir=out/one', '--max_iters=10')
    for flag in ('--position=rope', '--n_layer=2', '--seed=2', '--batch_size=5', '--learning_rate=0.5', '--optimizer=muon',
                 '--dropout=0.1'):
        run = train(project, '--out_dir=out/one', '--max_iters=10', '--init_from=resume', flag)
        assert_refused(run, 'out/one', flag[2:].split('=')[0], 'another --out_dir')
    for flag in ('--eval_interval=5', '--log_interval=1', '--dtype=float32', '--compile=False', '--deterministic=True'):
        trained(project, '--out_dir=out/one', '--max_iters=10', '--init_from=resume', flag)


def test_other_data_under_the_same_name_are_refused(project):
    trained(project, '--out_dir=out/data', '--max_iters=10')
    folder = os.path.join(project, 'data', 'tiny')
    shutil.copytree(folder, folder + '_before')
    text = read(os.path.join(folder, 'input.txt')).decode()
    make_data(folder, text[2000:], 18000)
    try:
        assert_refused(train(project, '--out_dir=out/data', '--max_iters=20', '--init_from=resume'),
                       'not in the data set tiny', '--dataset=tiny_before')
    finally:
        shutil.rmtree(folder)
        os.rename(folder + '_before', folder)


def test_a_resumed_run_remembers_how_it_began(project):
    trained(project, '--out_dir=out/base', '--position=rope')
    flags = ['--out_dir=out/tuned', '--position=rope', '--max_iters=10']
    trained(project, *flags, '--init_from=out/base')
    trained(project, *flags, '--init_from=resume', '--max_iters=20')
    assert state(project, 'tuned')['config']['init_from'] == 'out/base'
