"""The README's own example and commands work as they stand there."""
import glob
import os
import re
import shutil
import subprocess
import sys

from configurator import declared_settings

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
README = open(os.path.join(ROOT, 'README.md'), encoding='utf-8').read()


def run(folder, *words):
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_encoding_in_20_lines_trains_and_samples(tmp_path):
    for path in glob.glob(os.path.join(ROOT, '*.py')):
        shutil.copy(path, tmp_path)
    shutil.copytree(os.path.join(ROOT, 'data'), tmp_path / 'data')
    (example,) = re.findall(r'```python\n(.*?)```', README, re.S)
    assert len(example.strip().splitlines()) <= 20
    with open(tmp_path / 'model.py', 'a', encoding='utf-8') as file:
        file.write('\n\n' + example)
    trained = run(tmp_path, 'train.py', '--position=kerple', '--dataset=word_order', '--n_layer=2', '--n_embd=32', '--block_size=32',
                  '--batch_size=4', '--max_iters=30', '--eval_interval=10', '--eval_windows=8', '--device=cpu', '--compile=False',
                  '--dtype=float32')
    assert trained.returncode == 0, trained.stderr
    losses = [float(line.split(',')[5]) for line in open(tmp_path / 'out/kerple/log.csv').read().splitlines()[1:]]
    assert losses[-1] < losses[0] - 0.5
    sampled = run(tmp_path, 'sample.py', 'out/kerple', '--start= cat', '--max_new_tokens=50', '--context=64', '--device=cpu')
    assert sampled.returncode == 0 and len(sampled.stdout) > 50, sampled.stderr


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
        if script == 'compare.py':                      # which passes train.py's settings on
            known |= declared_settings(os.path.join(ROOT, 'train.py')).keys()
        for flag in re.findall(r'--(\w+)', rest):
            assert flag in known, (script, flag)
        for config in re.findall(r'config/[a-z0-9]+\.py', rest):
            assert os.path.exists(os.path.join(ROOT, config)), config
