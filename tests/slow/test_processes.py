"""Several processes under torchrun, on the CPU (gloo): the losses of one, one that writes, an end when one of them fails or is stopped."""
import os
import shutil
import signal
import sys
import time

import pytest
import torch

from conftest import SCHEMES
from harness import (HERE, TINY, assert_refused, at_step, command, differences_of_runs, make_project, read_log, start, state, train,
                     trained)

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
FLAGS = ['--learning_rate=1e-3', '--max_iters=50', '--eval_interval=10', '--gradient_accumulation_steps=2', '--batch_size=2']


def flags_of(scheme):
    return [*FLAGS, *(f'--{key}={value}' for key, value in SCHEMES[scheme].items())]


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('project'), files=False)


def test_two_processes_have_the_losses_of_one(project):
    """Every scheme over 50 steps, in one launch. In the same one a run is stopped and resumed, and in the end one process fails."""
    done = command(project, __file__, project, python=TORCHRUN, env={'PYTHONPATH': HERE})
    for rank in range(2):
        for what in (f'trained {len(SCHEMES)} schemes', 'resumed a run'):
            assert f'process {rank} has {what}' in done.out, done.out + done.err
    for scheme in SCHEMES:
        trained(project, *flags_of(scheme), f'--out_dir=out/{scheme}_one')
        one, two = read_log(project, f'{scheme}_one'), read_log(project, f'{scheme}_two')
        assert len(one) == len(two) == 6
        for alone, together in zip(one, two):
            assert alone[:2] + [alone[3]] == together[:2] + [together[3]]
            assert together[5] == pytest.approx(alone[5], abs=1e-5), scheme
            assert alone[4] == together[4] == '' or together[4] == pytest.approx(alone[4], abs=1e-5), scheme
        assert one[-1][5] < one[0][5] - 0.1

    assert done.code != 0 and 'val.bin has 10 bytes where meta.json says' in done.err
    assert not os.path.exists(os.path.join(project, 'out', 'failed', 'last.pt'))


def train_in_turn(project, rank):
    """What each of the two processes does: trains every scheme, stops a run and goes on with it, then lets one process fail."""
    # torchrun starts one job; here the processes stay connected from one run to the next.
    torch.distributed.init_process_group('gloo')
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda *backend: None
    replace, written = os.replace, []

    def replace_and_record(part, path):
        written.append(path)
        replace(part, path)

    os.replace = replace_and_record
    for scheme in SCHEMES:
        run = trained(project, *flags_of(scheme), f'--out_dir=out/{scheme}_two')
        assert bool(run.out) == bool(written) == (rank == 0)            # one process speaks and writes
    print(f'process {rank} has trained {len(SCHEMES)} schemes', flush=True)

    # A signal to one process, between two evaluations, stops both; resumed, they end as if it had not been.
    flags = [*FLAGS, '--dropout=0.2', '--max_iters=20', '--eval_interval=8']
    trained(project, *flags, '--out_dir=out/whole')
    with at_step(12, lambda: rank == 1 and os.kill(os.getpid(), signal.SIGTERM), pytest.MonkeyPatch()):
        assert train(project, *flags, '--out_dir=out/parts').code == 128 + signal.SIGTERM
    assert rank == 1 or state(project, 'parts')['iter_num'] == 13
    trained(project, *flags, '--out_dir=out/parts', '--init_from=resume')
    assert rank == 1 or not differences_of_runs(project, 'whole', 'parts')
    print(f'process {rank} has resumed a run', flush=True)

    if rank == 1:                                       # which finds its data damaged
        other = os.path.join(project, 'other')
        shutil.copytree(os.path.join(project, 'data'), os.path.join(other, 'data'))
        os.truncate(os.path.join(other, 'data', 'tiny', 'val.bin'), 10)
    run = train(project if rank == 0 else other, *FLAGS, '--out_dir=out/failed')
    print(run.err, file=sys.stderr, end='', flush=True)
    sys.exit(run.code)


def test_a_mistake_that_all_processes_see_is_said_once(project):
    done = command(project, 'train.py', *TINY, '--n_layr=3', python=TORCHRUN)
    assert done.code != 0 and done.err.count("did you mean 'n_layer'?") == 1, done.err


def test_processes_that_cannot_meet_say_so(project):
    done = command(project, 'train.py', *TINY, env={'WORLD_SIZE': '2', 'RANK': '0'})
    assert_refused(done, 'start them by torchrun')


def test_a_stopped_job_saves_once_and_goes_on(tmp_path):
    """SIGTERM to torchrun itself, which passes it on; then the same command in one process."""
    project = make_project(tmp_path / 'project')
    flags = [*TINY, *FLAGS, '--dropout=0.1', '--max_iters=1000000', '--eval_interval=1000000', '--out_dir=out/stopped']
    job = start(project, os.path.join(project, 'train.py'), *flags, python=TORCHRUN)
    assert any(line.startswith('step 0') for line in iter(job.stdout.readline, ''))
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    steps = state(project, 'stopped')['iter_num']
    assert job.returncode != 0 and out == f'stopped at step {steps} and saved; the same command with --init_from=resume goes on\n', err
    run = trained(project, *flags, '--init_from=resume', f'--max_iters={steps + 5}')
    assert f'going on from step {steps:,}' in run.out and state(project, 'stopped')['iter_num'] == steps + 5


if __name__ == '__main__':
    train_in_turn(sys.argv[1], int(os.environ['RANK']))
