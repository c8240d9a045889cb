"""
Kills training with SIGKILL at random moments, goes on each time as a user would, and compares the end with a run that was left alone. With
more kills than the test has, by hand:

    PYTHONPATH=tests python tests/slow/test_kills.py --kills=200

Every second kill falls while a checkpoint or the log is being written, the others at any time at all. A life is a forked process that
runs train.py: so that it takes a fraction of a second, PyTorch is imported once, here. When a run reaches its end before all kills are
spent, its weights, optimizer, log and best checkpoint are compared, and the next run begins. Exit status 1 if a run was lost or came
out another.
"""
import argparse
import collections
import glob
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time

from harness import HERE, ROOT, command, differences_of_runs, make_project, read, train

FLAGS = ['--optimizer=muon', '--dropout=0.1', '--position=rope', '--max_iters=200', '--eval_interval=5']


def test_killed_at_random_moments():
    done = command(ROOT, __file__, '--kills=4', env={'PYTHONPATH': HERE})
    assert done.code == 0, done.out + done.err
    assert '4 kills in' in done.out and 'no run was lost' in done.out


def life(project, *flags):
    """Starts train.py in a process of its own; returns its id. Its output goes to life.txt."""
    child = os.fork()
    if child == 0:
        try:
            run = train(project, *FLAGS, *flags)
            with open(os.path.join(project, 'life.txt'), 'w') as file:
                file.write(run.out + run.err)
            os._exit(run.code)
        finally:
            os._exit(99)        # a traceback
    return child


def ended(child):
    """The exit status of a process, or None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def wait_until(child, condition=lambda: False):
    """Returns when the condition holds, or with the exit status when the process ends by itself before."""
    while not condition():
        status = ended(child)
        if status is not None:
            return status
        time.sleep(0.0005)


def main(kills_wanted, seed):
    chance = random.Random(seed)
    project = make_project(os.path.join(tempfile.mkdtemp(prefix='kills'), 'project'), files=False)
    folder = os.path.join(project, 'out', 'killed')
    started = time.perf_counter()
    kills, before_any_checkpoint, ends, while_writing, faults = 0, 0, 0, collections.Counter(), []

    def next_life():
        return life(project, '--out_dir=out/killed', *['--init_from=resume'] * bool(glob.glob(os.path.join(folder, '*.pt'))))

    def being_written(child):
        return [os.path.basename(path).split('.')[0] for path in glob.glob(os.path.join(folder, f'*.{child}.part'))]

    def account(status):
        return f'exit status {status}: ' + read(os.path.join(project, 'life.txt')).decode()

    status = wait_until(life(project, '--out_dir=out/alone'))
    if status != 0:
        sys.exit('the run without kills failed: ' + account(status))
    longest = (time.perf_counter() - started) / 2       # seconds until a kill: two to six of them in a run

    while kills < kills_wanted and not faults:
        child = next_life()
        moment = time.perf_counter() + chance.uniform(0, longest)
        status = wait_until(child, lambda: time.perf_counter() >= moment)
        if status is None and kills % 2:
            file = chance.choice(['ckpt', 'last', 'log'])
            status = wait_until(child, lambda: file in being_written(child))
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
            while_writing.update(being_written(child))
            before_any_checkpoint += not glob.glob(os.path.join(folder, '*.pt'))
        elif status == 0:
            ends += 1
            faults += differences_of_runs(project, 'alone', 'killed')
            shutil.rmtree(folder)
        else:
            faults.append(account(status))

    if not faults:                                      # the last run may end in peace
        status = wait_until(next_life())
        ends += 1
        faults += differences_of_runs(project, 'alone', 'killed') if status == 0 else [account(status)]
    print(f'{kills} kills in {ends} runs of 200 steps, {before_any_checkpoint} before there was a checkpoint, {while_writing.total()} '
          f'while a file was being written: {dict(while_writing)}; {time.perf_counter() - started:.0f} s')
    if faults:
        sys.exit('\n'.join(faults + [f'see {project}']))
    print('no run was lost, and each ended as the run without kills did')
    shutil.rmtree(os.path.dirname(project))


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--kills', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    options = parser.parse_args()
    import torch._dynamo        # which PyTorch's optimizers import when first used
    for path in glob.glob(os.path.join(ROOT, '*.py')):
        if os.path.basename(path) not in ('train.py', 'sample.py', 'compare.py', 'bench.py'):
            importlib.import_module(os.path.basename(path).removesuffix('.py'))         # all that train.py needs
    main(options.kills, options.seed)
