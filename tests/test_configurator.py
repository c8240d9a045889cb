"""What configurator.py promises: settings from config files and flags, later ones win, types kept, nothing executed."""
import os
import runpy
import sys
import time

import pytest

from harness import ROOT, assert_one_line, assert_refused, command, ran, run
from configurator import declared_settings

SCRIPT = '''
"""What this script does."""
from configurator import configure

# ---------------------------------
# how long
steps: int = None       # how many
rate = 1e-3             # how fast
size = 4 * 256
# the rest
label: str = None       # what it is called
name = 'a'
quick = False           # leave things out
careful: bool = None
share: float = None
# ---------------------------------
settings, given, arguments = configure(globals(), __file__)
'''


@pytest.fixture
def configured(tmp_path, monkeypatch, capsys):
    """
    configured(*words, file=content, ...): the globals of SCRIPT, started with these words in a folder with these files (file.py each).
    Where it refuses instead: its one line.
    """
    def configured(*words, **files):
        (tmp_path / 'script.py').write_text(SCRIPT)
        for name, content in files.items():
            (tmp_path / f'{name}.py').write_bytes(content.encode() if isinstance(content, str) else content)
        monkeypatch.setattr(sys, 'argv', ['script.py', *words])
        monkeypatch.chdir(tmp_path)
        try:
            return runpy.run_path('script.py', run_name='__main__')
        except SystemExit as stop:
            out, err = capsys.readouterr()
            assert stop.code == 2 and out == ''
            assert_one_line(err, 'script.py: ')
            return err
    return configured


# ----------------------------------------------------------------------------------------------------------------------
# values and their types

@pytest.mark.parametrize('flag, name, value', [
    ('--steps=5', 'steps', 5),
    ('--steps=+5', 'steps', 5),
    ('--steps= 5 ', 'steps', 5),
    ('--steps=10_000', 'steps', 10000),
    ('--steps=0x10', 'steps', 16),
    ('--steps=None', 'steps', None),
    ('--steps=2 * 3 + 1', 'steps', 7),
    ('--steps=2**10', 'steps', 1024),
    ('--steps=7//2', 'steps', 3),
    ('--steps=-(-7 // 2)', 'steps', 4),
    ('--rate=.5', 'rate', 0.5),
    ('--rate=1/4', 'rate', 0.25),
    ('--rate=1', 'rate', 1.0),                          # a whole number is a number
    ('--share=1', 'share', 1.0),
    ('--share=None', 'share', None),
    ('--quick', 'quick', True),
    ('--quick=True', 'quick', True),
    ('--quick=false', 'quick', False),
    ('--careful', 'careful', True),
    ('--careful=None', 'careful', None),
    ('--label=None', 'label', None),
    ('--label=', 'label', ''),
    ('--name=None', 'name', 'None'),                    # a text that cannot be None is the word
    ('--name=a=b', 'name', 'a=b'),
    ('--name=--steps=4', 'name', '--steps=4'),
    ('--name=5', 'name', '5'),                          # text is taken as it stands
    ('--name=two words\nand a line', 'name', 'two words\nand a line'),
    ('--name=café', 'name', 'café'),
])
def test_flag(configured, flag, name, value):
    found = configured(flag)
    assert found[name] == value and type(found[name]) is type(value)
    assert found['given'] == {name: value} and found['settings'][name] == value


def test_defaults_stand_where_nothing_is_given(configured):
    found = configured()
    assert found['settings'] == dict(steps=None, rate=1e-3, size=1024, label=None, name='a', quick=False, careful=None, share=None)
    assert found['given'] == {} and found['arguments'] == []


@pytest.mark.parametrize('words, name, value', [
    (['--steps', '5'], 'steps', 5),
    (['--name', 'x y'], 'name', 'x y'),
    (['--name', '-x'], 'name', '-x'),
    (['--quick', 'False'], 'quick', False),
    (['--quick', '--steps', '3'], 'quick', True),
    (['--quick', 'true', '--steps=3'], 'quick', True),
])
def test_key_and_value_may_be_two_words(configured, words, name, value):
    assert configured(*words)[name] == value


@pytest.mark.parametrize('line, name, value', [
    ('steps = 5', 'steps', 5),
    ('steps = None', 'steps', None),
    ('steps = 4 * 256 - 1  # fewer', 'steps', 1023),
    ('steps = (\n    5\n)', 'steps', 5),
    ('rate = 3', 'rate', 3.0),
    ('rate = 1 / 3', 'rate', 1 / 3),
    ('name = "it\'s"', 'name', "it's"),
    ("name = 'one ' 'two'", 'name', 'one two'),         # Python's own concatenation of literals
    ("name = '\\\\d'", 'name', '\\d'),
    ("name = '\\d'", 'name', '\\d'),                    # without the warning that Python would print
    ('quick = True', 'quick', True),
    ('careful = None', 'careful', None),
    ('"""What for."""\n\n# why\nsteps = 5; rate = 2', 'steps', 5),
    ('steps = 4\nsteps = 5', 'steps', 5),
])
def test_config_file(configured, line, name, value):
    found = configured('my.py', my=line + '\n')
    assert found[name] == value and type(found[name]) is type(value)


@pytest.mark.parametrize('content', [
    b'\xef\xbb\xbfsteps = 5\n', b'steps = 5\r\nrate = 2\r\n', b'steps = 5', b'# caf\xc3\xa9\nsteps = 5\n', b'\n\n\nsteps = 5\n\n'])
def test_marks_and_line_ends_of_other_editors(configured, content):
    assert configured('my.py', my=content)['steps'] == 5


def test_later_ones_win(configured):
    files = dict(one='steps = 1\nrate = 1\n', two='steps = 2\n')
    assert configured('one.py', 'two.py', **files)['steps'] == 2
    assert configured('two.py', 'one.py', **files)['steps'] == 1
    found = configured('one.py', '--steps=3', 'two.py', '--steps=4', **files)       # flags win wherever they stand
    assert (found['steps'], found['rate']) == (4, 1.0) and found['arguments'] == ['one.py', 'two.py']
    assert found['given'] == {'steps': 4, 'rate': 1.0}


# ----------------------------------------------------------------------------------------------------------------------
# what is refused: test_bad_input.py has more of it

@pytest.mark.parametrize('words, parts', [
    (['--stps=3'], ["'stps'", "did you mean 'steps'?"]),
    (['my.py'], ['my.py, line 3', "'stps'", "did you mean 'steps'?"]),
    (['--steps=3', 'my.py'], ['my.py, line 3']),
    (['other.py'], ['other.py, line 2', 'only assignments']),
    (['third.py'], ['third.py, line 4', 'steps', 'whole number', 'None', '`"3"`']),
    (['--rate=None'], ['--rate', 'a number', 'None']),
    (['--rate=True'], ['--rate', 'a number', 'True']),
    (['--quick', '1'], ['--quick', 'True or False']),
])
def test_refused(configured, words, parts):
    line = configured(*words, my='# a\n\nstps = 3\n', other='steps = 3\nimport os\n', third='steps = (\n  4\n)\nsteps = "3"\n')
    assert isinstance(line, str)
    for part in parts:
        assert part in line


@pytest.mark.parametrize('text', [
    '10**10**10', '(10**100)**100', '1e6**100 * 1e6**100', '((((9**9)**9)**9)**9)', '9' * 100_000, '0x' + 'f' * 100_000, '"a"*10**10',
    '1e308*10', '2.0**1024', '1<<10**9'])
@pytest.mark.parametrize('in_file', [False, True])
def test_large_numbers_are_refused_quickly(configured, text, in_file):
    started = time.perf_counter()
    line = configured('my.py', my=f'steps = {text}\n') if in_file else configured(f'--steps={text}')
    assert isinstance(line, str) and len(line) < 300 and time.perf_counter() - started < 2


# ----------------------------------------------------------------------------------------------------------------------
# the repository's own scripts

SCRIPTS = ['train.py', 'sample.py', 'compare.py', 'bench.py', *(f'data/{name}/prepare.py' for name in (
    'shakespeare_char', 'shakespeare_bpe', 'tinyshakespeare', 'word_order', 'text'))]


@pytest.mark.parametrize('script', SCRIPTS)
def test_help_lists_every_setting_with_its_meaning(tmp_path, script):
    result = ran(str(tmp_path), script, '--help')
    assert result.err == ''
    declared = declared_settings(os.path.join(ROOT, script))
    assert len(declared) >= 2
    for name, default in declared.items():
        assert f'--{name}={default.value!r}' in result.out
        assert len(default.comment) > 3 and default.comment in result.out, name
    assert os.listdir(tmp_path) == []


def test_help_of_a_training_lists_the_options_of_every_scheme(tmp_path):
    printed = ran(str(tmp_path), 'train.py', '--help').out
    for option, default in (('sinusoidal_base', 10000.0), ('shaw_values', False), ('rope_scaling', "'none'"), ('yarn_beta_fast', 32.0),
                            ('t5_buckets', 32)):
        assert f'--{option}={default}' in printed


@pytest.mark.parametrize('script', SCRIPTS)
def test_help_comes_at_once(tmp_path, script):
    """That is, without PyTorch and the like, whose import takes seconds: importing them would be an error."""
    for name in ('torch', 'tiktoken', 'matplotlib'):
        (tmp_path / f'{name}.py').write_text('raise ImportError("not needed for --help")')
    done = command(tmp_path, script, '--help', env={'PYTHONPATH': str(tmp_path)})
    assert done.code == 0 and 'settings' in done.out and done.err == '', done.err


def test_every_config_file_can_be_read(tmp_path):
    for name in os.listdir(os.path.join(ROOT, 'config')):
        if name.endswith('.py'):                        # it is read before the model is refused
            flags = [os.path.join(ROOT, 'config', name), '--n_head=3', '--n_embd=16', '--init_from=scratch', '--device=cpu']
            assert_refused(run(str(tmp_path), 'train.py', *flags), 'multiple of n_head')
