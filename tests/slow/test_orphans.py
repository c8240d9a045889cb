"""compare.py's trainings end with it, saved, whatever ends it; the same command then goes on; and one comparison has a folder at a time."""
import os
import signal
import time

import pytest

from harness import assert_refused, command, make_project, read, start, state, tree
from test_compare import FLAGS

NAMES = ('compare/rope-seed1337', 'compare/alibi-seed1337')
ASKED = [*FLAGS, '--dataset=tiny', '--schemes=rope,alibi', '--seeds=1', '--jobs=2', '--eval_interval=50']


def trainings(project):
    """How many processes run the project's train.py."""
    done = command(project, '/bin/ps', '-eo', 'args', python=())
    return sum(os.path.join(project, 'train.py') in line for line in done.out.splitlines())


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_trainings_end_with_the_comparison(tmp_path, number, request):
    project = make_project(tmp_path / 'project')
    compare = os.path.join(project, 'compare.py')
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)           # these tests may run under nohup, which is inherited
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))

    def has_saved(name):
        return os.path.exists(os.path.join(project, 'out', name, 'last.pt'))

    with start(project, compare, *ASKED, '--max_iters=1000000') as process:
        wait_for(lambda: all(map(has_saved, NAMES)) or process.poll() is not None)
        assert trainings(project) == 2
        process.send_signal(number)
        process.wait(timeout=60)
    wait_for(lambda: trainings(project) == 0)
    for name in NAMES:
        assert b'and saved' in read(os.path.join(project, 'out', name, 'output.txt'))
        assert state(project, name)['iter_num'] > 0


def test_two_comparisons_take_turns_and_a_killed_one_goes_on_at_once(tmp_path):
    project = make_project(tmp_path / 'project')
    compare = os.path.join(project, 'compare.py')
    with start(project, compare, *ASKED, '--max_iters=20000') as process:
        wait_for(lambda: os.path.exists(os.path.join(project, 'out', NAMES[0], 'last.pt')))
        assert_refused(command(project, compare, *ASKED, '--max_iters=20000'), 'another process is writing to out/compare', '--out_dir')
        assert trainings(project) == 2 and process.poll() is None
        process.kill()
    done = command(project, compare, *ASKED, '--max_iters=20000')
    assert done.code == 0, done.err
    assert b'going on from step' in read(os.path.join(project, 'out', NAMES[0], 'output.txt'))
    assert not [path for path in tree(os.path.join(project, 'out')) if path.endswith('.part')]
