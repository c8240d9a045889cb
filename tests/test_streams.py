"""
What streams.py promises, of every script: text is read in one way, whatever an editor has made of it; what is written is UTF-8, or what a
terminal can take and cannot be harmed by; and a closed or a full output is no reason for a traceback, or to end what takes hours.
"""
import glob
import os
import pty
import shutil
import subprocess
import sys
import termios
import time

import pytest

from harness import ROOT, TINY, assert_one_line, assert_refused, command, make_data, make_project, ran, read, run, trained, write
from streams import open_text, visible

SCRIPTS = ['train.py', 'sample.py', 'compare.py', 'bench.py'] + [f'data/{name}/prepare.py' for name in (
    'shakespeare_char', 'shakespeare_bpe', 'tinyshakespeare', 'word_order', 'text')]
OUTPUTS = {'closed': '>&-', 'errors closed': '2>&-', 'all closed': '<&- >&- 2>&-', 'full': '>/dev/full', 'errors full': '2>/dev/full',
           'all full': '>/dev/full 2>/dev/full', 'unread': '| true', 'read to a line': '| head -1'}


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp('project'))
    shutil.copytree(os.path.join(ROOT, 'data', 'word_order'), os.path.join(folder, 'data', 'word_order'), dirs_exist_ok=True)
    shutil.copytree(os.path.join(ROOT, 'data', 'text'), os.path.join(folder, 'data', 'text'), dirs_exist_ok=True)
    trained(folder, '--out_dir=out/a')
    return folder


def shell(folder, line, **environment):
    """A line for the shell, in which `python` is this one: exit status of the first command, stdout, stderr."""
    line = f'set -o pipefail; {line.replace("python ", sys.executable + " ")}'
    done = subprocess.run(['bash', '-c', line], cwd=folder, capture_output=True, text=True, timeout=300,
                          env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore', **environment})
    assert 'Traceback' not in done.stderr and 'Exception ignored' not in done.stderr, done.stderr
    return done


# ----------------------------------------------------------------------------------------------------------------------
# outputs that nobody reads

@pytest.mark.parametrize('script', SCRIPTS)
def test_help_on_a_closed_or_full_output(script, tmp_path):
    for output in ('<&- >&- 2>&-', '>/dev/full', '| true'):
        done = shell(tmp_path, f'python {os.path.join(ROOT, script)} --help {output}')
        assert done.returncode == 0 and done.stderr == '', output


@pytest.mark.parametrize('output', ['>&-', '>/dev/full', '| head -1'])
def test_sampling_ends_in_one_line_or_silently(output, project):
    done = shell(project, f'python sample.py out/a --device=cpu --max_new_tokens=3000 {output}')
    if '>/dev/full' in output.split():
        assert done.returncode == 2
        if '2>' not in output:
            assert_one_line(done.stderr, 'sample.py: ', 'No space left')
    else:
        assert done.returncode in (0, 141) and done.stderr == ''        # 141: SIGPIPE, as of any command
    assert done.returncode != 141 or '|' in output


@pytest.mark.parametrize('output', ['2>&-', '2>/dev/full', '>&-'])
def test_a_mistake_is_one_unheard(output, project):
    done = shell(project, f'python train.py --n_head=3 {output}')
    assert done.returncode == 2 and (done.stderr == '') == ('2>' in output)


# ----------------------------------------------------------------------------------------------------------------------
# characters

def on_terminal(folder, *words, **environment):
    """What a command writes to a terminal, which is its stdout and its stderr."""
    main, end = pty.openpty()
    termios.tcsetwinsize(main, (24, 120))
    process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=end, stderr=end, stdin=end,
                               env={**os.environ, 'OMP_NUM_THREADS': '1', **environment})
    os.close(end)
    found = b''
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:                                 # the other end is closed
            break
        if not piece:
            break
        found += piece
    os.close(main)
    assert process.wait() == 0, found
    return found.decode().replace('\r\n', '\n')


def train_on(project, name, text):
    make_data(os.path.join(project, 'data', name), text, len(text) // 2)
    trained(project, f'--dataset={name}', '--max_iters=1', f'--out_dir=out/{name}')


def test_a_strangers_vocabulary_cannot_control_a_terminal(project):
    """Raw in a file, where it harms nothing; escaped on a terminal, save line ends and tabs."""
    train_on(project, 'evil', '\x1b\x07\x9b\x7f\r\u202e\tab\n' * 40)
    words = ['sample.py', 'out/evil', '--device=cpu', '--max_new_tokens=300', '--start=ab\x1b']
    shown = on_terminal(project, *words)
    assert not set(shown) & set('\x1b\x07\x9b\x7f\r\u202e')
    for escape in ('\\x1b', '\\x07', '\\x9b', '\\x7f', '\\u202e'):
        assert escape in shown
    assert '\x1b' in ran(project, *words).out
    assert_refused(run(project, 'sample.py', 'out/\x1b]0;evil\x07', '--device=cpu'), 'out/\\x1b]0;evil\\x07')
    assert visible('a\tb\né\x1b[2J😀') == 'a\tb\né\\x1b[2J😀'


@pytest.mark.parametrize('encoding', ['cp1252', 'utf-16'])
def test_what_is_no_terminal_gets_utf8(encoding, project):
    if not os.path.exists(os.path.join(project, 'out', 'letters')):
        train_on(project, 'letters', 'Ωж猫😀é\n' * 60)
    done = shell(project, 'python sample.py out/letters --device=cpu --max_new_tokens=200 --start=Ωж >text; cat text',
                 PYTHONIOENCODING=encoding)
    assert done.stdout.startswith('Ωж') and set(done.stdout) == set('Ωж猫😀é\n-') and done.stderr == ''


def test_lines_and_bar_each_where_they_belong(project):
    """`python train.py | tee log`: the bar on the terminal, the lines in the log."""
    log = os.path.join(project, 'log')
    words = ' '.join([sys.executable, 'train.py', *TINY, '--out_dir=out/tee', '--log_interval=1'])
    shown = on_terminal(project, '-c', f'import os; os.system("{words} >{log}")')
    assert 'step/s' in shown and 'validation loss' not in shown
    lines = read(log).decode().splitlines()
    assert [line.split(':')[0] for line in lines if line.startswith('step ')] == ['step 0', 'step 10', 'step 20', 'step 30']
    assert 'step 0' not in on_terminal(project, 'train.py', *TINY, '--out_dir=out/tee', '--overwrite')


# ----------------------------------------------------------------------------------------------------------------------
# what is read

KINDS = {'plain': 'who has seen\n\nthe wind', 'mark': '\ufeffwho has seen\n\nthe wind', 'windows': 'who has seen\r\n\r\nthe wind',
         'old mac': '\ufeffwho has seen\r\rthe wind'}


@pytest.mark.parametrize('kind', KINDS)
def test_text_is_read_in_one_way(kind, project):
    """A prompt, a text to train on, a config file: the same of each, whatever an editor has made of it."""
    write(os.path.join(project, 'prompt.txt'), KINDS[kind])
    shown = ran(project, 'sample.py', 'out/a', '--device=cpu', '--max_new_tokens=0', '--start=FILE:prompt.txt').out
    assert shown.startswith('who has seen\n\nthe wind\n---')
    write(os.path.join(project, 'own.txt'), KINDS[kind] * 40)
    with open_text(os.path.join(project, 'own.txt')) as file:
        assert file.read().startswith(KINDS['plain'])
    write(os.path.join(project, 'my.py'), KINDS[kind].replace('who has seen', '# a comment').replace('the wind', 'n_head = 3'))
    result = run(project, 'train.py', *[flag for flag in TINY if 'n_head' not in flag], 'my.py', '--out_dir=out/new')
    assert_refused(result, 'multiple of n_head 3')


@pytest.mark.parametrize('content', [b'\xff\xfew\x00h\x00', b'caf\xe9', b'a' * 100000 + b'\x80'])
def test_what_is_not_utf8_is_told_so(content, project):
    write(os.path.join(project, 'other.txt'), content)
    assert_refused(run(project, 'sample.py', 'out/a', '--device=cpu', '--start=FILE:other.txt'), 'other.txt', 'not UTF-8')
    assert_refused(run(project, 'data/text/prepare.py', '--input=other.txt', '--folder=new'), 'other.txt', 'not UTF-8')


def test_what_would_exhaust_or_hang_is_refused_at_once(project):
    """Configs that are huge, or all but; pipes and devices in place of files."""
    os.mkfifo(os.path.join(project, 'pipe'))
    shutil.copytree(os.path.join(project, 'data', 'tiny'), os.path.join(project, 'data', 'piped'))
    os.remove(os.path.join(project, 'data', 'piped', 'meta.json'))
    os.mkfifo(os.path.join(project, 'data', 'piped', 'meta.json'))
    os.makedirs(os.path.join(project, 'out', 'piped'))
    os.mkfifo(os.path.join(project, 'out', 'piped', 'config.json'))
    for name, content in {'lines.py': 'seed = 1\n' * 10_000, 'line.py': 'seed = ' + '1 + ' * 2_500_000 + '1',
                          'nearly.py': 'seed=1\n' * 9_000, 'comment.py': '#' * 10 ** 7}.items():
        write(os.path.join(project, name), content)
    train_with = [*TINY, '--out_dir=out/new']
    begun = time.perf_counter()
    for words in (['lines.py'], ['line.py'], ['comment.py'], ['pipe'], ['/dev/zero']):
        assert_refused(run(project, 'train.py', *train_with, *words), words[0], 'cannot be read')
    assert_refused(run(project, 'train.py', *train_with, '--n_head=3', 'nearly.py'), 'multiple of n_head 3')
    assert_refused(run(project, 'train.py', *train_with, '--dataset=piped'), 'meta.json', 'no regular file')
    assert_refused(run(project, 'sample.py', 'out/a', '--device=cpu', '--start=FILE:pipe'), 'pipe', 'no regular file')
    assert_refused(run(project, 'sample.py', 'out/a', '--device=cpu', '--start=FILE:/dev/zero'), 'no regular file')
    for name, flag in (('text', 'input'), ('tinyshakespeare', 'input'), ('shakespeare_char', 'wheel')):
        for path in ('pipe', '/dev/zero'):
            assert_refused(run(project, f'data/{name}/prepare.py', f'--{flag}={path}', '--folder=new'), 'no regular file')
    assert_refused(run(project, 'compare.py', 'out/piped', '--device=cpu'), 'config.json', 'cannot be read')
    assert time.perf_counter() - begun < 20


def test_a_data_folders_files_cannot_pass_for_pythons_own(tmp_path):
    """A stranger's hashlib.py beside prepare.py, and others: none is run."""
    make_project(tmp_path / 'project')
    for path in glob.glob(os.path.join(ROOT, 'data', '*', '*.py')):
        folder = os.path.join(tmp_path, 'project', 'data', os.path.basename(os.path.dirname(path)))
        os.makedirs(folder, exist_ok=True)
        shutil.copy(path, folder)
        for name in ('hashlib', 'http', 'json', 'numpy', 're', 'random', 'tqdm', 'tiktoken', 'configurator', 'dataset', 'streams'):
            write(os.path.join(folder, f'{name}.py'), 'open("attacked", "w")\nraise SystemExit("a stranger\'s")\n')
    for name, flags, status in (('text', ['--input=none.txt'], 2), ('tinyshakespeare', ['--input=none.txt'], 2), ('word_order', [], 0),
                                ('shakespeare_char', ['--wheel=none.whl'], 2), ('shakespeare_bpe', ['--wheel=none.whl'], 2)):
        folder = os.path.join(tmp_path, 'project', 'data', name)
        done = command(tmp_path, os.path.join(folder, 'prepare.py'), *flags)
        assert done.code == status and 'stranger' not in done.err, done.err
    assert not glob.glob(os.path.join(tmp_path, '**', 'attacked'), recursive=True)
