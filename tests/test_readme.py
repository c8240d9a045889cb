"""The README's own example and commands work as they stand there."""
import os
import re
import shutil

from configurator import declared_settings
from harness import ROOT, command, make_project, ran, read_log

README = open(os.path.join(ROOT, 'README.md'), encoding='utf-8').read()


def test_the_encoding_in_20_lines_trains_and_samples(tmp_path):
    make_project(tmp_path)
    shutil.copytree(os.path.join(ROOT, 'data', 'word_order'), tmp_path / 'data' / 'word_order')
    (example,) = re.findall(r'```python\n(.*?)```', README, re.S)
    assert len(example.strip().splitlines()) <= 20
    with open(tmp_path / 'model.py', 'a', encoding='utf-8') as file:
        file.write('\n\n' + example)
    trained = command(tmp_path, tmp_path / 'train.py', '--position=kerple', '--dataset=word_order', '--n_layer=2', '--n_embd=32',
                      '--block_size=32', '--batch_size=4', '--max_iters=30', '--eval_interval=10', '--eval_windows=8', '--device=cpu')
    assert trained.code == 0, trained.err
    losses = [row[5] for row in read_log(tmp_path, 'kerple')]
    assert losses[-1] < losses[0] - 0.5
    sampled = command(tmp_path, tmp_path / 'sample.py', 'out/kerple', '--start= cat', '--max_new_tokens=50', '--context=64',
                      '--device=cpu')
    assert sampled.code == 0 and len(sampled.out) > 50, sampled.err


def test_every_config_stands_in_the_table_of_schemes():
    for name in os.listdir(os.path.join(ROOT, 'config')):
        assert f'`{name[:-3]}`' in README or f'config/{name}' in README, name


def test_commands_name_scripts_and_settings_that_exist():
    commands = re.findall(r'(?:python|torchrun[^`\n]*?) ((?:data/\w+/)?\w+\.py)([^`\n#&]*)', README)
    assert len(commands) > 10
    for script, rest in commands:
        path = os.path.join(ROOT, script)
        assert os.path.exists(path), script
        known = {'help'} | declared_settings(path).keys()
        if script in ('train.py', 'compare.py'):        # compare.py passes train.py's settings on, those of the schemes among them
            known |= set(re.findall(r'^ +--(\w+)=', ran(ROOT, 'train.py', '--help').out, re.M))
        for flag in re.findall(r'--(\w+)', rest):
            assert flag in known, (script, flag)
        for config in re.findall(r'config/[a-z0-9]+\.py', rest):
            assert os.path.exists(os.path.join(ROOT, config)), config
