"""Long runs and large data: memory stays flat, and data are never read as a whole."""
import os
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='memory is read from /proc')
def test_memory_is_flat_on_two_gigabytes_of_data():
    """The short form of measure_memory.py; 2000 steps and 50 evaluations are for doing by hand."""
    done = subprocess.run([sys.executable, os.path.join(HERE, 'measure_memory.py'), '--steps=400', '--evaluations=40'],
                          env={**os.environ, 'OMP_NUM_THREADS': '1'}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '42 evaluations, on 2 GB of data' in done.stdout             # 40 intervals, both ends, and the last on all windows
