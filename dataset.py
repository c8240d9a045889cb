"""
Data sets on disk, shared by the prepare scripts, train.py and sample.py. A data set is a folder with

    train.bin, val.bin    token ids, uint16, little-endian, one after the other and nothing else
    meta.json             the tokenizer's description, vocabulary size, token counts, source, and hashes
    input.txt             the text, where a prepare script keeps it: first what is for training

A tokenizer's description is plain JSON, so that a checkpoint can carry it and sampling needs no data folder:

    {"kind": "char", "characters": "\\n !',-.:;?ABC..."}     one token per character
    {"kind": "word", "words": ["\\n", " ,", " cat", ...]}    one token per word, its leading blank included
    {"kind": "gpt2"}                                        GPT-2's byte pair encoding, by tiktoken

Nothing here executes or unpickles what it reads.
"""
import contextlib
import difflib
import errno
import functools
import glob
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np

from configurator import fail
from streams import open_text

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data')
GPT2_VOCABULARY = 50257
LARGEST_VOCABULARY = 2 ** 16                    # what uint16 can number
FEWEST_TOKENS = 65                              # of either part: a window of 64, and the one that follows
PREPARED_UNASKED = ('shakespeare_bpe', 'shakespeare_char', 'tinyshakespeare', 'word_order')     # safe to run
LARGEST_META = 2 ** 24                          # bytes
LARGEST_HASHED = 2 ** 28                        # bytes; of larger .bin files the size alone is checked


# ------------------------------------------------------------------------------------------------------------
# tokenizers. Each has encode(text) -> uint16 array, decode(ids) -> text, decode_bytes(ids) -> UTF-8 bytes,
# vocab_size, to_dict(). ids may be any sequence of whole numbers: a list, an array, a tensor. What cannot be
# encoded is a ValueError of one sentence.

def shown(pieces):
    """A vocabulary for an error message, cut where it is long."""
    text = repr(''.join(pieces))
    return text if len(text) <= 200 else text[:200] + '...'


class CharTokenizer:
    """One token per character; ids number the distinct `characters`, text or list, by code point."""

    def __init__(self, characters):
        self.characters = ''.join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        self.code_points = np.array([ord(character) for character in self.characters], dtype=np.uint32)

    def encode(self, text):
        code_points = np.frombuffer(text.encode('utf-32-le', errors='surrogatepass'), dtype='<u4')
        ids = np.searchsorted(self.code_points, code_points).astype(np.uint16)
        unknown = self.code_points.take(ids, mode='clip') != code_points
        if unknown.any():
            raise ValueError(f'the vocabulary has no character {chr(code_points[unknown][0])!r}; use only '
                             f'{shown(self.characters)}')
        return ids

    def decode(self, ids):
        return ''.join(self.characters[id] for id in ids)

    def decode_bytes(self, ids):
        return self.decode(ids).encode('utf-8', errors='surrogatepass')

    def to_dict(self):
        return {'kind': 'char', 'characters': self.characters}


class WordTokenizer:
    """
    One token per word. As in GPT-2's vocabulary a word carries the blank before it, so decoding is mere
    concatenation: 'a cat\\n' is 'a', ' cat', '\\n'.
    """

    def __init__(self, words):
        self.words = sorted(set(words))
        self.vocab_size = len(self.words)
        self.ids = {word: id for id, word in enumerate(self.words)}

    def encode(self, text):
        words = re.findall(r'\n| *[^ \n]+| +', text)
        for word in words:
            if word not in self.ids:
                raise ValueError(f'the vocabulary has no word {word!r}; use only {shown(self.words)}')
        return np.array([self.ids[word] for word in words], dtype=np.uint16)

    def decode(self, ids):
        return ''.join(self.words[id] for id in ids)

    def decode_bytes(self, ids):
        return self.decode(ids).encode('utf-8', errors='surrogatepass')

    def to_dict(self):
        return {'kind': 'word', 'words': self.words}


class BPETokenizer:
    """
    GPT-2's byte pair encoding; <|endoftext|>, which stands between texts, is one token. tiktoken is imported,
    and its vocabulary read, only when one is made.
    """

    vocab_size = GPT2_VOCABULARY

    def __init__(self):
        try:
            import tiktoken
            self.encoding = tiktoken.get_encoding('gpt2')
        except ImportError:
            raise ValueError('the gpt2 tokenizer needs tiktoken; run `pip install tiktoken`') from None
        except Exception as error:              # the network's errors come in many classes
            raise ValueError(
                f'tiktoken can neither find nor download its gpt2 vocabulary ({error.__class__.__name__}); '
                'where there is network run `TIKTOKEN_CACHE_DIR=cache python -c "import tiktoken; '
                'tiktoken.get_encoding(\'gpt2\')"`, then bring that folder here and set TIKTOKEN_CACHE_DIR '
                'to its path') from None

    def encode(self, text):
        return np.array(self.encoding.encode(text, allowed_special='all'), dtype=np.uint16)

    def decode(self, ids):
        """A token may cut a character in two, which shows as U+FFFD: streams should use decode_bytes."""
        return self.decode_bytes(ids).decode('utf-8', errors='replace')

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes([int(id) for id in ids])

    def to_dict(self):
        return {'kind': 'gpt2'}


def described_size(description):
    """The vocabulary size of a tokenizer's description; ValueError, in one sentence, if it describes none."""
    kind = description.get('kind') if isinstance(description, dict) else None
    if kind == 'gpt2':
        return GPT2_VOCABULARY
    if kind not in ('char', 'word'):
        raise ValueError(f'there is no tokenizer of kind {kind!r}; the kinds are char, word and gpt2')
    pieces = description.get('characters' if kind == 'char' else 'words')
    if not (isinstance(pieces, str if kind == 'char' else list)
            and all(isinstance(piece, str) for piece in pieces)
            and list(pieces) == sorted(set(pieces)) and 0 < len(pieces) <= LARGEST_VOCABULARY):
        raise ValueError(f'the vocabulary of the {kind} tokenizer is damaged')
    return len(pieces)


def make_tokenizer(description):
    """The tokenizer that to_dict() described; ValueError, in one sentence, where that cannot be."""
    described_size(description)
    if description['kind'] == 'gpt2':
        return BPETokenizer()
    if description['kind'] == 'char':
        return CharTokenizer(description['characters'])
    return WordTokenizer(description['words'])


# ------------------------------------------------------------------------------------------------------------
# writing

def make_folder(path):
    """Makes a folder, and those above it, where they are missing. One line where that cannot be."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        fail(f'the folder {path} cannot be made ({error.strerror}); choose another')


def write_whole(path, write):
    """Writes a file by write(file), which gets it open: there always is a whole one, the old or the new."""
    write_together({path: write})


def write_together(files):
    """
    Writes {path: write}, all or none: each beside its place and flushed to the disk, then all are renamed in
    turn. Of several the last vouches for the others: it goes first and comes back last, so that a crash
    between two renames shows. One line when the disk is full or the like; what was there is whole then.
    """
    parts = {path: f'{path}.{os.getpid()}.part' for path in files}
    try:
        for path, write in files.items():
            with open(parts[path], 'wb') as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        if len(files) > 1:
            with contextlib.suppress(FileNotFoundError):
                os.remove(list(files)[-1])
        for path in files:
            os.replace(parts[path], path)
    except (OSError, RuntimeError) as error:            # torch.save hides a full disk behind a RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__
        known = isinstance(cause, OSError) and cause.errno
        reason = os.strerror(cause.errno) if known else str(error).splitlines()[0]
        remedy = ('see whether that folder may be written to, or choose another'
                  if known and cause.errno != errno.ENOSPC else
                  'free some space, then resume, or run this again')
        fail(f'{path} could not be written ({reason}); what was there before is whole: {remedy}')
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                os.remove(part)


def remove_parts(folder, names):
    """Removes what kills in mid-writing have left of files. For whoever alone writes to the folder."""
    for name in names:
        for leftover in glob.glob(glob.escape(os.path.join(folder, name)) + '.[0-9]*.part'):
            os.remove(leftover)


@contextlib.contextmanager
def turn_at(path):
    """Within the block, no other process is in such a block for the same file or folder; a kill ends it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):         # there may be no locks here
            import fcntl
            held = os.open(path, os.O_RDONLY)
            stack.callback(os.close, held)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def check_place(folder, text):
    """
    One line if a data set in the folder would replace what is none's. text: the input.txt to be written, or
    None. In a script's own folder .bin files may be what a crash has left.
    """
    before, foreign, kept = None, [], os.path.join(folder, 'input.txt')
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        with open_text(os.path.join(folder, 'meta.json'), LARGEST_META) as file:
            before = json.load(file)['sha256']['text']
    if not before and os.path.realpath(folder) != os.path.dirname(os.path.realpath(sys.argv[0])):
        foreign = [name for name in ('train.bin', 'val.bin', 'meta.json')
                   if os.path.lexists(os.path.join(folder, name))]
    if text is not None and os.path.isfile(kept):
        with open(kept, 'rb') as file:
            found = hashlib.file_digest(file, 'sha256').hexdigest()
        foreign += ['input.txt'] * (found not in (before, hashlib.sha256(text).hexdigest()))
    if foreign:
        fail(f'{folder} holds {", ".join(foreign)} of another origin, which would be replaced; choose '
             'another --folder, or move that away')


def write_dataset(folder, train_text, val_text, tokenizer, source, keep_text=True, notes=None,
                  if_short='give more'):
    """
    Writes a data set of the two texts, or ends the script with one line and leaves the folder as it was.

    texts       each as a whole, or, unless keep_text, as an iterator of pieces, the first one's read first
    source      one sentence: where the text is from, and which part of it is held out
    keep_text   whether to write input.txt too
    notes       whatever else meta.json should say: plain JSON
    if_short    the remedy for a text that is too short
    Returns meta.json's content.
    """
    if tokenizer.vocab_size > LARGEST_VOCABULARY:
        fail(f'the text has {tokenizer.vocab_size:,} distinct characters, and at most {LARGEST_VOCABULARY:,} '
             'fit; use --tokenizer=gpt2')
    text = (train_text + val_text).encode() if keep_text else None
    check_place(folder, text)
    counts, hashes = {}, {name: hashlib.sha256() for name in ('text', 'train.bin', 'val.bin')}
    meta = {'tokenizer': tokenizer.to_dict(), 'vocab_size': tokenizer.vocab_size}

    def write_ids(name, part, pieces, file):
        counts[name] = 0
        for piece in [pieces] if isinstance(pieces, str) else pieces:
            ids = tokenizer.encode(piece).astype('<u2').tobytes()
            file.write(ids)
            counts[name] += len(ids) // 2
            hashes[name].update(ids)
            hashes['text'].update(piece.encode())
        if counts[name] < FEWEST_TOKENS:
            fail(f'the text is too short: its {part} part has {counts[name]} tokens and needs '
                 f'{FEWEST_TOKENS}; {if_short}')

    def write_meta(file):
        meta.update(train_tokens=counts['train.bin'], val_tokens=counts['val.bin'], source=source,
                    sha256={name: found.hexdigest() for name, found in hashes.items()})
        meta.update({'notes': notes} if notes else {})
        file.write((json.dumps(meta, indent=1) + '\n').encode('ascii'))

    writers = {'train.bin': functools.partial(write_ids, 'train.bin', 'training', train_text),
               'val.bin': functools.partial(write_ids, 'val.bin', 'validation', val_text)}
    if keep_text:
        writers['input.txt'] = lambda file: file.write(text)
    writers['meta.json'] = write_meta
    make_folder(folder)
    with turn_at(folder):
        remove_parts(folder, writers)
        write_together({os.path.join(folder, name): write for name, write in writers.items()})
    print(f'{folder}: {meta["train_tokens"]:,} training tokens, {meta["val_tokens"]:,} validation tokens, '
          f'vocabulary of {meta["vocab_size"]:,}')
    return meta


# ------------------------------------------------------------------------------------------------------------
# reading

def is_count(value):
    return type(value) is int and value > 0


def check_whose(folder):
    """One line if a folder without meta.json is one of nanoGPT's."""
    if any(os.path.exists(os.path.join(folder, name)) for name in ('train.bin', 'val.bin', 'meta.pkl')):
        fail(f"{folder} lacks a meta.json; if it is a data folder of nanoGPT's, `python "
             f'data/import_nanogpt.py {folder}` makes one; else run its prepare.py again')


def read_meta(folder, files):
    """
    meta.json's content, checked against the .bin files, which `files`, {split: file}, gets open. One line if
    anything does not fit.
    """
    path = os.path.join(folder, 'meta.json')
    remedy = 'run its prepare.py again'
    try:
        with open_text(path, LARGEST_META) as file:
            meta = json.load(file)
    except FileNotFoundError:
        check_whose(folder)
        fail(f'{path} does not exist, so there is no data set; run its prepare.py')
    except OSError as error:
        fail(f'{path} cannot be read ({error.strerror}); check the path')
    except (ValueError, RecursionError):                # not UTF-8, not JSON, or nested beyond reason
        fail(f'{path} is damaged: it is not JSON; {remedy}')
    try:
        if not (isinstance(meta, dict) and is_count(meta.get('train_tokens'))
                and is_count(meta.get('val_tokens')) and isinstance(meta.get('source'), str)
                and isinstance(meta.get('sha256'), dict)):
            raise ValueError('an entry is missing or of the wrong type')
        size = described_size(meta.get('tokenizer'))
        if meta.get('vocab_size') != size:
            raise ValueError(f'vocab_size is not {size}, as its tokenizer has it')
    except ValueError as error:
        fail(f'{path} is damaged: {error}; {remedy}')
    for split in ('train', 'val'):
        path = os.path.join(folder, split + '.bin')
        expected = 2 * meta[f'{split}_tokens']
        try:
            found = os.path.getsize(path)
            if found != expected:
                fail(f'{path} has {found:,} bytes where meta.json says {expected:,}; {remedy}')
            files[split] = open(path, 'rb')
            if found <= LARGEST_HASHED:
                content = files[split].read()
                if hashlib.sha256(content).hexdigest() != meta['sha256'].get(split + '.bin'):
                    fail(f"{path} is damaged: its sha256 is not meta.json's; {remedy}")
                if np.frombuffer(content, dtype='<u2').max() >= size:
                    fail(f"{path} was made by another tokenizer than meta.json's: some ids are beyond its "
                         f"{size:,} tokens; {remedy}")
        except OSError as error:
            fail(f'{path} cannot be read ({error.strerror}); {remedy}')
    return meta


def version(file):
    """What changes when an open file is written to."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


class Dataset:
    """
    A prepared data set. Opening it checks it; a fault ends the script with one line. Its files stay open: it
    remains what it was when others are put in their places.
    """

    def __init__(self, folder):
        self.folder, self.files = folder, {}
        self.meta = read_meta(folder, self.files)
        self.versions = {split: version(file) for split, file in self.files.items()}
        self.vocab_size = self.meta['vocab_size']

    def tokens(self, split):
        """
        All ids of 'train' or 'val' as a uint16 array on disk. Ask for a fresh one for every batch: an old one
        keeps the pages that it has read, and memory would grow with them (nanoGPT, train.py, get_batch).
        """
        file = self.files[split]
        if version(file) != self.versions[split]:
            fail(f'{file.name} was written to while it was in use; prepare it again as it was, then resume')
        return np.memmap(file, dtype='<u2', mode='r')

    @functools.cached_property
    def tokenizer(self):
        """Made when first asked for, since training needs none and gpt2's is slow to load."""
        try:
            return make_tokenizer(self.meta['tokenizer'])
        except ValueError as error:
            fail(error)


def read_ids(tokens, places, vocab_size):
    """
    The ids at some places of what Dataset.tokens() returns, int64. One line if one is beyond the vocabulary:
    of large files that shows only here.
    """
    ids = tokens[places].astype(np.int64)
    if ids.max() >= vocab_size:
        fail(f'{getattr(tokens, "filename", "the data")} was made by another tokenizer: id {ids.max()} is '
             f'beyond its {vocab_size:,} tokens; run its prepare.py again')
    return ids


def data_folder(name):
    """
    A data set's folder: data/<name> beside this file, wherever the script runs; or any folder, by a path such
    as ./mine. One line if there is none.
    """
    names = sorted(entry for entry in os.listdir(DATA) if any(
        os.path.exists(os.path.join(DATA, entry, file)) for file in ('meta.json', 'train.bin', 'prepare.py')))
    if name in names:
        return os.path.join(DATA, name)
    above, last = os.path.split(name.rstrip('/'))
    nearest = difflib.get_close_matches(last, names, n=2)
    if os.path.isdir(name) and (above or name != last) and not (above == 'data' and nearest):
        return name
    remedy = (f'did you mean {" or ".join(nearest)}?' if nearest else
              'check the path, or write it out where it begins with ~' if above else
              f'did you mean ./{name}?' if os.path.isdir(name) and name[0] != '.' else
              f'there are {", ".join(names)}; data/text is for a file of your own')
    fail(f'there is no data set {name!r}; {remedy}')


def name_of_data(hashes, name):
    """What the data set `name`, of these hashes, is called now in data/: `name`, where it is in its place."""
    for candidate in [name, *sorted(os.listdir(DATA))]:
        folder = candidate if os.sep in candidate else os.path.join(DATA, candidate)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            with open_text(os.path.join(folder, 'meta.json'), LARGEST_META) as file:
                if json.load(file)['sha256'] == hashes:
                    return candidate
    return name


def prepare_if_missing(name):
    """
    Runs data/<name>/prepare.py if it has not been run yet; its failure, which it has explained, ends this
    script too. Only those that came with this repository: to run the code of a folder from elsewhere is for
    its user to decide.
    """
    folder = data_folder(name)
    if not os.path.exists(os.path.join(folder, 'meta.json')):
        if name not in PREPARED_UNASKED:
            check_whose(folder)
            place = folder if folder == name else f'data/{name}'
            script = f'{place}/prepare.py' if os.path.exists(os.path.join(folder, 'prepare.py')) else (
                f'data/text/prepare.py --input=FILE --folder={place}')
            fail(f'the data set {name} is not there yet; run `python {script}` first (with --help it lists '
                 'its settings)')
        script = os.path.join(folder, 'prepare.py')
        with turn_at(script):
            if os.path.exists(os.path.join(folder, 'meta.json')):       # another process has prepared it
                return folder
            print(f'data set {name} is not there yet: running data/{name}/prepare.py', flush=True)
            done = subprocess.run([sys.executable, script])
        if done.returncode != 0:
            sys.exit(2)
    return folder
