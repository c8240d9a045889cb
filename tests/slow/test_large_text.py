"""
Texts of any size are prepared in the same memory. The test has 30 MB; by hand, in under 1 GB of address space:

    PYTHONPATH=tests python tests/slow/test_large_text.py --megabytes=300

It prints how much memory each tokenizer takes, and its throughput. Exit status 1 where preparing failed.
"""
import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time

import pytest

from harness import ROOT, WORDS, read
from dataset import BPETokenizer


@pytest.mark.parametrize('tokenizer', ['char', 'gpt2'])
def test_memory_does_not_grow_with_the_text(tokenizer, tmp_path):
    if tokenizer == 'gpt2':
        try:
            BPETokenizer()
        except ValueError as error:
            pytest.skip(str(error))
    small, large = (prepared(tmp_path, size, tokenizer)[1] for size in (5, 30))
    assert large < small + 20, (small, large)


def prepared(folder, megabytes, tokenizer, limit=10 ** 9):
    """Prepares a text of that size within `limit` bytes of address space: seconds, and the most memory held, in MB."""
    path, chance = os.path.join(folder, 'large.txt'), random.Random(0)
    page = ''.join(chance.choice(WORDS) + chance.choice('    \n') for _ in range(200_000)).encode()
    with open(path, 'wb') as file:
        while file.tell() < megabytes * 10 ** 6:
            file.write(page)
    code = ('import json, resource, runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, ""); runpy.run_path(sys.argv[0], run_name="__main__"); '
            'print(json.dumps([next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1000]))')
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, '-c', code, os.path.join(ROOT, 'data', 'text', 'prepare.py'), f'--input={path}',
                           f'--folder={os.path.join(folder, tokenizer)}', f'--tokenizer={tokenizer}'], capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert done.returncode == 0, done.stderr
    seconds, [memory] = time.perf_counter() - begun, json.loads(done.stdout.splitlines()[-1])
    meta = json.loads(read(os.path.join(folder, tokenizer, 'meta.json')))
    assert meta['train_tokens'] + meta['val_tokens'] > (0.9 if tokenizer == 'char' else 0.15) * megabytes * 10 ** 6
    return seconds, memory


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--megabytes', type=int, default=300)
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory(prefix='large') as folder:
        for tokenizer in ('char', 'gpt2'):
            seconds, memory = prepared(folder, megabytes, tokenizer)
            print(f'{tokenizer}: {megabytes} MB in {seconds:.0f} s, {megabytes / seconds:.1f} MB/s; {memory:.0f} MB of memory at most')
