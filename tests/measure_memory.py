"""
Trains a tiny model on 2 GB of data and prints what it takes of memory: at the start, at every evaluation, and at most.

    python tests/measure_memory.py --steps=2000 --evaluations=50

Exit status 1 if memory grew by more than 5% after the first tenth of the run, or if it ever held a good part of the data.
tests/test_long_runs.py calls it with fewer steps.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile

import torch

from tiny_runs import make_project, train

import measure


def resident():
    """What this process holds in memory, in MB."""
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2 ** 20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--evaluations', type=int, default=50)
    options = parser.parse_args()

    project = make_project(os.path.join(tempfile.mkdtemp(prefix='memory'), 'project'), files=False)
    folder = os.path.join(project, 'data', 'tiny')
    os.truncate(os.path.join(folder, 'train.bin'), 2 ** 31)             # a sparse file: zeros that take no space on the disk
    with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as file:
        meta = json.load(file)
    with open(os.path.join(folder, 'meta.json'), 'w', encoding='utf-8') as file:
        json.dump({**meta, 'train_tokens': 2 ** 30}, file)

    sum_of_losses, at_evaluations = measure.sum_of_losses, []

    def measure_and_sum(*arguments):
        at_evaluations.append(resident())
        return sum_of_losses(*arguments)

    measure.sum_of_losses = measure_and_sum
    at_start = resident()
    run = train(project, '--position=rope', '--optimizer=muon', f'--max_iters={options.steps}',
                f'--eval_interval={options.steps // options.evaluations}', '--out_dir=out/long')
    shutil.rmtree(os.path.dirname(project))
    if run.code != 0:
        sys.exit(run.err)
    peak = measure.peak_memory(torch.device('cpu'))
    settled, end = at_evaluations[len(at_evaluations) // 10], at_evaluations[-1]
    print(f'{options.steps} steps, {len(at_evaluations)} evaluations, on 2 GB of data: {at_start:.0f} MB before, {settled:.0f} MB after '
          f'a tenth, {end:.0f} MB at the end ({end / settled - 1:+.1%}), {peak:.0f} MB at most')
    if max(at_evaluations) > 1.05 * settled or peak > at_start + 200:
        sys.exit('memory is not flat')


if __name__ == '__main__':
    main()
