"""
Files from strangers run no code: checkpoints, config files and data folders are read, never executed. Each attack below would make a file
called `attacked`, and a first test shows that it would.
"""
import ast
import glob
import os
import pickle
import shutil

import pytest
import torch

from harness import ROOT, TINY, assert_refused, make_project, read, run, trained, write


class Attack:
    """Pickled, it calls `function` as soon as it is unpickled."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


CODE = "open('attacked', 'w')"
ATTACKS = {
    'open': Attack(open, 'attacked', 'w'),
    'eval': Attack(eval, CODE),
    'exec': Attack(exec, CODE),
    'system': Attack(os.system, 'touch attacked'),
    'nested': Attack(len, [Attack(open, 'attacked', 'w')]),
}


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A project with a run, out/good."""
    folder = make_project(tmp_path_factory.mktemp('project'), files=False)
    trained(folder, '--max_iters=2', '--eval_interval=1', '--position=rope', '--out_dir=out/good')
    return folder


@pytest.fixture(autouse=True)
def not_attacked(project):
    """After every test: no attack has succeeded."""
    yield
    assert not os.path.exists(os.path.join(project, 'attacked'))


# ----------------------------------------------------------------------------------------------------------------------
# checkpoints

@pytest.mark.parametrize('attack', ATTACKS)
def test_the_attacks_would_work(attack, tmp_path, monkeypatch):
    """Otherwise what follows would show nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(ATTACKS[attack]))
    assert os.path.exists('attacked')


def plain_pickle(checkpoint, attack, path):
    write(path, pickle.dumps({'model': attack, 'model_args': {}}))


def in_the_weights(checkpoint, attack, path):
    torch.save({**checkpoint, 'model': {**checkpoint['model'], 'lm_head.weight': attack}}, path)


def beside_the_weights(checkpoint, attack, path):
    torch.save({**checkpoint, 'config': {**checkpoint['config'], 'seed': attack}}, path)


def in_a_tuple(checkpoint, attack, path):
    torch.save({**checkpoint, 'wandb_id': (attack,)}, path)


def old_format(checkpoint, attack, path):
    torch.save({**checkpoint, 'best_val_loss': attack}, path, _use_new_zipfile_serialization=False)


HIDING_PLACES = [plain_pickle, in_the_weights, beside_the_weights, in_a_tuple, old_format]


def hide_in_run(project, hide, attack):
    """Makes out/evil a copy of out/good, whose checkpoints hold the attack."""
    evil = os.path.join(project, 'out', 'evil')
    shutil.rmtree(evil, ignore_errors=True)
    shutil.copytree(os.path.join(project, 'out', 'good'), evil)
    checkpoint = torch.load(os.path.join(evil, 'ckpt.pt'), weights_only=True)
    for name in ('ckpt.pt', 'last.pt'):
        hide(checkpoint, ATTACKS[attack], os.path.join(evil, name))


@pytest.mark.parametrize('attack', ATTACKS)
@pytest.mark.parametrize('hide', HIDING_PLACES)
def test_sample_does_not_run_a_checkpoint(project, hide, attack):
    hide_in_run(project, hide, attack)
    assert_refused(run(project, 'sample.py', 'out/evil', '--device=cpu'), 'out/evil', 'is not opened')


@pytest.mark.parametrize('hide', HIDING_PLACES)
def test_no_other_script_runs_a_checkpoint(project, hide):
    hide_in_run(project, hide, 'open')
    for script, *flags in (('train.py', *TINY, '--init_from=out/evil', '--out_dir=out/new'),
                           ('train.py', *TINY, '--init_from=resume', '--out_dir=out/evil'),
                           ('train.py', *TINY, '--init_from=out/evil', '--eval_only'),
                           ('compare.py', 'out/evil', '--device=cpu'),
                           ('compare.py', 'out/evil', '--device=cpu', '--scalings=none')):
        assert_refused(run(project, script, *flags), 'out/evil', 'is not opened')


def test_a_good_checkpoint_of_the_same_kind_is_opened(project):
    """The refusals above are not for another reason."""
    assert run(project, 'sample.py', 'out/good', '--device=cpu', '--max_new_tokens=2').code == 0


# ----------------------------------------------------------------------------------------------------------------------
# config files and flags

@pytest.mark.parametrize('line', [
    CODE,
    f'seed = {CODE}',
    f'seed = eval("{CODE}")',
    f'import os; os.system("touch attacked")',
    f'seed = __import__("os").system("touch attacked")',
    f'seed = [1 for _ in [{CODE}]]',
    f'seed = (lambda: {CODE})()',
    f'seed = f"{{{CODE}}}"',
    f'seed: {CODE} = 3',
    f'class seed(metaclass={CODE}): pass',
    f'def seed(x={CODE}): pass',
    f'@{CODE}\ndef seed(): pass',
    f'seed = 3 if {CODE} else 4',
    f'assert {CODE}',
    'from attack import *',
    '# -*- coding: unicode_escape -*-\n# \\u000aopen("attacked", "w")',     # an encoding in which the comment is code
])
def test_config_files_are_not_executed(project, line):
    write(os.path.join(project, 'evil.py'), line + '\n')
    write(os.path.join(project, 'attack.py'), CODE)
    result = run(project, 'train.py', 'evil.py', *TINY, '--max_iters=1', '--out_dir=out/new', '--overwrite')
    if line.startswith('#'):                            # to us it is a comment
        assert result.code == 0
    else:
        assert_refused(result, 'evil.py', 'line')


@pytest.mark.parametrize('script', ['train.py', 'sample.py', 'compare.py', 'data/word_order/prepare.py'])
def test_flags_are_not_executed(project, script):
    for value in (CODE, f"__import__('os').system('touch attacked')", f'[{CODE}]', f'(lambda: {CODE})()'):
        assert_refused(run(project, script, f'--seed={value}'), '--seed', 'whole number')


# ----------------------------------------------------------------------------------------------------------------------
# data folders

def test_a_strangers_prepare_script_is_not_run(project):
    """Only those that came with the repository are run unasked: see dataset.py."""
    write(os.path.join(project, 'data', 'gift', 'prepare.py'), CODE)
    result = run(project, 'train.py', *TINY, '--dataset=gift', '--out_dir=out/new2')
    assert_refused(result, 'gift', 'python data/gift/prepare.py')


def test_nothing_in_a_data_folder_is_unpickled_or_imported(project):
    """A data set that works, with nanoGPT's meta.pkl and Python files beside: none of them is touched."""
    folder = os.path.join(project, 'data', 'laden')
    shutil.copytree(os.path.join(project, 'data', 'tiny'), folder)
    write(os.path.join(folder, 'meta.pkl'), pickle.dumps(ATTACKS['open']))
    for name in ('__init__.py', 'prepare.py', 'tokenizer.py', 'numpy.py', 'sitecustomize.py'):
        write(os.path.join(folder, name), CODE)
    assert run(project, 'train.py', *TINY, '--max_iters=1', '--dataset=laden', '--out_dir=out/laden').code == 0
    assert run(project, 'sample.py', 'out/laden', '--device=cpu', '--dataset=laden', '--max_new_tokens=2').code == 0


@pytest.mark.parametrize('name', ['meta.json', 'train.bin'])
def test_pickles_in_place_of_data_are_refused(project, name):
    """test_data.py has more of these."""
    folder = os.path.join(project, 'data', 'pickled_' + name.split('.')[0])
    shutil.copytree(os.path.join(project, 'data', 'tiny'), folder)
    write(os.path.join(folder, name), pickle.dumps(ATTACKS['open']))
    result = run(project, 'train.py', *TINY, f'--dataset={os.path.basename(folder)}', '--out_dir=out/new3')
    assert_refused(result, name, 'prepare.py')


# ----------------------------------------------------------------------------------------------------------------------

def calls_of(path):
    """The calls in a Python file: [(the function's name as written, its arguments, the keyword ones, line)]."""
    tree = ast.parse(read(path))
    return [(ast.unparse(node.func), ', '.join(map(ast.unparse, node.args)), {word.arg: ast.unparse(word.value) for word in node.keywords}, node.lineno)
            for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize('path', sorted(os.path.relpath(path, ROOT) for pattern in ('*.py', 'config/*.py', 'data/*/*.py')
                                        for path in glob.glob(os.path.join(ROOT, pattern))))
def test_no_code_executes_or_unpickles_what_it_reads(path):
    for name, arguments, options, line in calls_of(os.path.join(ROOT, path)):
        if (name, arguments) == ('runpy.run_path', "os.path.join(HERE, 'data', 'word_order', 'sentences.py')"):
            continue                                    # the repository's own
        assert name not in ('eval', 'exec', 'compile', '__import__', 'os.system', 'os.popen', 'importlib.import_module',
                            'runpy.run_path'), line
        assert not name.startswith(('pickle.', 'marshal.', 'shelve.', 'joblib.', 'dill.')) and name not in ('np.load', 'numpy.load'), line
        assert options.get('shell', 'False') == 'False', line
        if name == 'torch.load':
            assert options.get('weights_only') == 'True', line
