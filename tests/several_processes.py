"""
Run by test_processes.py under torchrun, in each of two processes: trains every scheme in turn, stops a run and goes on with it, then lets
one process fail.

    torchrun --standalone --nproc_per_node=2 tests/several_processes.py PROJECT FLAGS...
"""
import os
import shutil
import signal
import sys

import pytest
import torch

from conftest import SCHEMES
from tiny_runs import at_step, differences, read_log, state, train, without_times

import runs

project, *flags = sys.argv[1:]
rank = int(os.environ['RANK'])

# torchrun starts one job; here the processes stay connected from one run to the next.
torch.distributed.init_process_group('gloo')
torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda *backend: None

write_whole, written = runs.write_whole, []


def write_and_record(path, write):
    written.append(path)
    write_whole(path, write)


runs.write_whole = write_and_record
for scheme, options in SCHEMES.items():
    run = train(project, *flags, *[f'--{key}={value}' for key, value in options.items()], f'--out_dir=out/{scheme}_two')
    assert run.code == 0, run.err
    assert bool(run.out) == bool(written) == (rank == 0)                # one process speaks and writes
print(f'process {rank} has trained {len(SCHEMES)} schemes', flush=True)

# A signal to one process, between two evaluations, stops both; resumed, they end as if it had not been.
flags_here = [*flags, '--dropout=0.2', '--max_iters=20', '--eval_interval=8']
assert train(project, *flags_here, '--out_dir=out/whole').code == 0
with at_step(12, lambda: rank == 1 and os.kill(os.getpid(), signal.SIGTERM), pytest.MonkeyPatch()):
    assert train(project, *flags_here, '--out_dir=out/parts').code == 128 + signal.SIGTERM
if rank == 0:
    assert state(project, 'parts')['iter_num'] == 13
assert train(project, *flags_here, '--out_dir=out/parts', '--init_from=resume').code == 0
if rank == 0:
    assert not differences(state(project, 'whole'), state(project, 'parts'))
    assert without_times(read_log(project, 'whole')) == without_times(read_log(project, 'parts'))
print(f'process {rank} has resumed a run', flush=True)

if rank == 1:                                           # which finds its data damaged
    other = os.path.join(project, 'other')
    shutil.copytree(os.path.join(project, 'data'), os.path.join(other, 'data'))
    os.truncate(os.path.join(other, 'data', 'tiny', 'val.bin'), 10)
run = train(project if rank == 0 else other, *flags, '--out_dir=out/failed')
print(run.err, file=sys.stderr, end='', flush=True)
sys.exit(run.code)
