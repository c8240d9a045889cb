"""Every way in which nobody hears a training, a comparison, or the prepare script that the training starts: they go on."""
import os
import shutil

import pytest

from harness import ROOT, TINY, make_project, read, trained
from test_streams import OUTPUTS, shell


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp('project'))
    shutil.copytree(os.path.join(ROOT, 'data', 'word_order'), os.path.join(folder, 'data', 'word_order'))
    trained(folder, '--out_dir=out/a')
    return folder


@pytest.mark.parametrize('output', OUTPUTS.values(), ids=OUTPUTS)
def test_training_preparing_and_comparing_go_on_unheard(output, project):
    """The data are not prepared yet: the prepare script has the same output."""
    folder = os.path.join(project, 'data', 'word_order')
    for name in ('meta.json', 'train.bin', 'val.bin', 'input.txt'):
        if os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))
    flags = ' '.join([*TINY, '--dataset=word_order', '--max_iters=2', '--out_dir=out/unheard', '--overwrite'])
    done = shell(project, f'python train.py {flags} {output}')
    assert done.returncode == 0 and done.stderr == ''
    assert read(os.path.join(project, 'out', 'unheard', 'log.csv')).count(b'\n') == 3
    done = shell(project, f'python compare.py out/a --device=cpu --sweep_tokens=64 --longest=1 --out_dir=out/table {output}')
    assert done.returncode == 0 and done.stderr == ''
    table = os.path.join(project, 'out', 'table', 'table.md')
    assert b'learned' in read(table)
    os.remove(table)
