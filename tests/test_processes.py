"""Several processes under torchrun, on the CPU (gloo): the losses of one, one that writes, an end when one of them fails or is stopped."""
import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import SCHEMES
from tiny_runs import HERE, TINY, make_project, read_log, state, train_command, trained

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
FLAGS = ['--learning_rate=1e-3', '--max_iters=50', '--eval_interval=10', '--gradient_accumulation_steps=2', '--batch_size=2']


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('project'))


def test_two_processes_have_the_losses_of_one(project):
    """Every scheme over 50 steps, in one launch. In the same one a run is stopped and resumed, and in the end one process fails."""
    done = subprocess.run([*TORCHRUN, os.path.join(HERE, 'several_processes.py'), project, *FLAGS], capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'}, timeout=300)
    for rank in range(2):
        assert f'process {rank} has trained {len(SCHEMES)} schemes' in done.stdout, done.stdout + done.stderr
        assert f'process {rank} has resumed a run' in done.stdout, done.stdout + done.stderr
    for scheme, options in SCHEMES.items():
        trained(project, *FLAGS, *[f'--{key}={value}' for key, value in options.items()], f'--out_dir=out/{scheme}_one')
        one, two = read_log(project, f'{scheme}_one'), read_log(project, f'{scheme}_two')
        assert len(one) == len(two) == 6
        for alone, together in zip(one, two):
            assert alone[:2] + [alone[3]] == together[:2] + [together[3]]
            assert together[5] == pytest.approx(alone[5], abs=1e-5), scheme
            assert alone[4] == together[4] == '' or together[4] == pytest.approx(alone[4], abs=1e-5), scheme
        assert one[-1][5] < one[0][5] - 0.1

    assert done.returncode != 0 and 'val.bin has 10 bytes where meta.json says' in done.stderr
    assert not os.path.exists(os.path.join(project, 'out', 'failed', 'last.pt'))


def test_a_mistake_that_all_processes_see_is_said_once(project):
    job = train_command(project, *TINY, '--n_layr=3', start=TORCHRUN)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0 and err.count("did you mean 'n_layer'?") == 1, err


def test_processes_that_cannot_meet_say_so(project):
    job = train_command(project, *TINY, environment={'WORLD_SIZE': '2', 'RANK': '0'})       # not started by torchrun
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2 and len(err.splitlines()) == 1 and 'start them by torchrun' in err, err


def test_a_stopped_job_saves_once_and_goes_on(project):
    """SIGTERM to torchrun itself, which passes it on; then the same command in one process."""
    flags = [*TINY, *FLAGS, '--dropout=0.1', '--max_iters=1000000', '--eval_interval=1000000', '--out_dir=out/stopped']
    job = train_command(project, *flags, start=TORCHRUN)
    lines = iter(job.stdout.readline, '')
    assert any(line.startswith('step 0') for line in lines)
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    steps = state(project, 'stopped')['iter_num']
    assert job.returncode != 0 and out == f'stopped at step {steps} and saved; the same command with --init_from=resume goes on\n', err
    run = trained(project, *flags, '--init_from=resume', f'--max_iters={steps + 5}')
    assert f'going on from step {steps:,}' in run.out and state(project, 'stopped')['iter_num'] == steps + 5
