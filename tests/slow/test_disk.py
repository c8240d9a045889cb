"""A disk that is full in earnest: 4 MB, mounted as a run's folder."""
import os
import subprocess

import pytest

from harness import assert_refused, at_step, contents, differences_of_runs, make_project, train, trained


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path / 'project', files=False)


@pytest.fixture
def small_disk(project):
    """A disk of 4 MB, mounted as the project's out/small; skips where that is not allowed."""
    folder = os.path.join(project, 'out', 'small')
    os.makedirs(folder)
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', folder], capture_output=True).returncode != 0:
        pytest.skip('mounting a small disk takes root')
    yield folder
    subprocess.run(['umount', folder])


def test_disk_full_while_saving(project, small_disk, monkeypatch):
    filler, wider = os.path.join(small_disk, 'filler'), '--n_embd=64'           # tensors that no buffer holds
    trained(project, wider, '--out_dir=out/large')

    def fill_the_disk():
        before.update(contents(small_disk))
        with open(filler, 'wb', buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(filler, os.path.getsize(filler) - 50000)                    # room for a piece of a checkpoint

    for step in (15, 25):                               # before the evaluation at step 20, and before the end
        before = {}
        with at_step(step % 20, fill_the_disk, monkeypatch):
            run = train(project, wider, '--out_dir=out/small', *(['--init_from=resume'] if step > 15 else []))
        assert_refused(run, os.path.join('out', 'small'), 'No space left on device', 'free some space')
        os.remove(filler)
        assert contents(small_disk) == before and set(before) == {'ckpt.pt', 'last.pt', 'log.csv', 'config.json'}
    trained(project, wider, '--out_dir=out/small', '--init_from=resume')
    assert not differences_of_runs(project, 'large', 'small')
