"""
Long runs and large data: memory stays flat, and data are never read as a whole. A tiny model trains on 2 GB; with more steps than the test
has, by hand:

    PYTHONPATH=tests python tests/slow/test_memory.py --steps=2000 --evaluations=50

Exit status 1 if memory grew by more than 5% after the first tenth of the run, or if it ever held a good part of the data.
"""
import argparse
import functools
import json
import os
import resource
import shutil
import sys
import tempfile

import pytest

from harness import HERE, ROOT, TINY, assert_refused, command, make_project, read, train, write


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='memory is read from /proc')
def test_memory_is_flat_on_two_gigabytes_of_data():
    done = command(ROOT, __file__, '--steps=400', '--evaluations=40', env={'PYTHONPATH': HERE})
    assert done.code == 0, done.out + done.err
    assert '42 logs, on 2 GB of data' in done.out       # after 41 evaluations, and first with the first checkpoint, all files at once


@pytest.mark.parametrize('flags', ['--batch_size=50000 --block_size=1024', '--n_embd=4096 --n_layer=2 --optimizer=adamw'])
def test_too_little_memory_is_one_line(flags, tmp_path):
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (800_000 * 1024,) * 2)
    project = make_project(tmp_path / 'project')
    done = command(project, os.path.join(project, 'train.py'), *TINY, *flags.split(), preexec_fn=limit)
    assert_refused(done, 'memory', 'smaller')


def memory(entry):
    """What this process holds in memory, 'VmRSS', or has held at most, 'VmHWM': in MB."""
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) for line in file if line.startswith(entry)) / 2 ** 10


def main(steps, evaluations):
    project = make_project(os.path.join(tempfile.mkdtemp(prefix='memory'), 'project'), files=False)
    folder = os.path.join(project, 'data', 'tiny')
    os.truncate(os.path.join(folder, 'train.bin'), 2 ** 31)             # a sparse file: zeros that take no space on the disk
    meta = json.loads(read(os.path.join(folder, 'meta.json')))
    write(os.path.join(folder, 'meta.json'), json.dumps({**meta, 'train_tokens': 2 ** 30}))

    replace, at_evaluations = os.replace, []

    def look_and_replace(part, path):                   # log.csv is written after every evaluation
        if path.endswith('log.csv'):
            at_evaluations.append(memory('VmRSS'))
        replace(part, path)

    os.replace = look_and_replace
    at_start = memory('VmRSS')
    run = train(project, '--position=rope', '--optimizer=muon', f'--max_iters={steps}', f'--eval_interval={steps // evaluations}',
                '--out_dir=out/long')
    shutil.rmtree(os.path.dirname(project))
    if run.code != 0:
        sys.exit(run.err)
    peak, settled, end = memory('VmHWM'), at_evaluations[len(at_evaluations) // 10], at_evaluations[-1]
    print(f'{steps} steps, {len(at_evaluations)} logs, on 2 GB of data: {at_start:.0f} MB before, {settled:.0f} MB after '
          f'a tenth, {end:.0f} MB at the end ({end / settled - 1:+.1%}), {peak:.0f} MB at most')
    if max(at_evaluations) > 1.05 * settled or peak > at_start + 200:
        sys.exit('memory is not flat')


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--evaluations', type=int, default=50)
    options = parser.parse_args()
    main(options.steps, options.evaluations)
