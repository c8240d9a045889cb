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
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np

from configurator import fail

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data')
GPT2_VOCABULARY = 50257
LARGEST_VOCABULARY = 2 ** 16                    # what uint16 can number
FEWEST_TOKENS = 65                              # of either part: a window of 64, and the one that follows
PREPARED_UNASKED = ('shakespeare_bpe', 'shakespeare_char', 'tinyshakespeare', 'word_order')     # safe to run
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
        unknown = np.setdiff1d(code_points, self.code_points)
        if len(unknown):
            raise ValueError(f'the vocabulary has no character {chr(unknown[0])!r}; use only '
                             f'{shown(self.characters)}')
        return np.searchsorted(self.code_points, code_points).astype(np.uint16)

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
        return self.decode(ids).encode('utf-8')

    def to_dict(self):
        return {'kind': 'word', 'words': self.words}


class BPETokenizer:
    """GPT-2's byte pair encoding. tiktoken is imported, and its vocabulary read, only when one is made."""

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
        return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)

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


def write_dataset(folder, train_text, val_text, tokenizer, source, keep_text=True, notes=None):
    """
    Writes a data set of the two texts, or ends the script with one line and leaves the folder as it was.

    source      one sentence: where the text is from, and which part of it is held out
    keep_text   whether to write input.txt too
    notes       whatever else meta.json should say: plain JSON
    Returns meta.json's content.
    """
    if tokenizer.vocab_size > LARGEST_VOCABULARY:
        fail(f'the text has {tokenizer.vocab_size:,} distinct characters, and at most {LARGEST_VOCABULARY:,} '
             'fit; use --tokenizer=gpt2')
    ids = {'train.bin': tokenizer.encode(train_text), 'val.bin': tokenizer.encode(val_text)}
    for name, part in (('train.bin', 'training'), ('val.bin', 'validation')):
        if len(ids[name]) < FEWEST_TOKENS:
            fail(f'the text is too short: its {part} part has {len(ids[name])} tokens and needs '
                 f'{FEWEST_TOKENS}; give more')
    contents = {name: array.astype('<u2').tobytes() for name, array in ids.items()}
    text = (train_text + val_text).encode('utf-8')
    meta = {'tokenizer': tokenizer.to_dict(), 'vocab_size': tokenizer.vocab_size,
            'train_tokens': len(ids['train.bin']), 'val_tokens': len(ids['val.bin']), 'source': source,
            'sha256': {'text': hashlib.sha256(text).hexdigest(),
                       **{name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}}}
    if notes:
        meta['notes'] = notes
    if keep_text:
        contents['input.txt'] = text
    contents['meta.json'] = (json.dumps(meta, indent=1) + '\n').encode('ascii')
    make_folder(folder)
    write_together({os.path.join(folder, name): lambda file, content=content: file.write(content)
                    for name, content in contents.items()})
    print(f'{folder}: {meta["train_tokens"]:,} training tokens, {meta["val_tokens"]:,} validation tokens, '
          f'vocabulary of {meta["vocab_size"]:,}')
    return meta


# ------------------------------------------------------------------------------------------------------------
# reading

def is_count(value):
    return type(value) is int and value > 0


def read_meta(folder):
    """meta.json's content, checked against the .bin files. One line if anything does not fit."""
    path = os.path.join(folder, 'meta.json')
    remedy = 'run its prepare.py again'
    try:
        with open(path, encoding='utf-8') as file:
            meta = json.load(file)
    except FileNotFoundError:
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
            if found <= LARGEST_HASHED:
                with open(path, 'rb') as file:
                    content = file.read()
                if hashlib.sha256(content).hexdigest() != meta['sha256'].get(split + '.bin'):
                    fail(f"{path} is damaged: its sha256 is not meta.json's; {remedy}")
                if np.frombuffer(content, dtype='<u2').max() >= size:
                    fail(f"{path} was made by another tokenizer than meta.json's: some ids are beyond its "
                         f"{size:,} tokens; {remedy}")
        except OSError as error:
            fail(f'{path} cannot be read ({error.strerror}); {remedy}')
    return meta


class Dataset:
    """A prepared data set. Opening it checks it; a fault ends the script with one line."""

    def __init__(self, folder):
        self.folder = folder
        self.meta = read_meta(folder)
        self.vocab_size = self.meta['vocab_size']

    def tokens(self, split):
        """
        All ids of 'train' or 'val' as a uint16 array on disk. Ask for a fresh one for every batch: an old one
        keeps the pages that it has read, and memory would grow with them (nanoGPT, train.py, get_batch).
        """
        return np.memmap(os.path.join(self.folder, split + '.bin'), dtype='<u2', mode='r')

    @functools.cached_property
    def tokenizer(self):
        """Made when first asked for, since training needs none and gpt2's is slow to load."""
        try:
            return make_tokenizer(self.meta['tokenizer'])
        except ValueError as error:
            fail(error)


def data_folder(name):
    """A data set's folder, data/<name> beside this file, wherever the script runs. One line if unknown."""
    names = sorted(entry for entry in os.listdir(DATA) if any(
        os.path.exists(os.path.join(DATA, entry, file)) for file in ('meta.json', 'prepare.py')))
    if name not in names:
        nearest = difflib.get_close_matches(os.path.basename(name.rstrip('/')), names, n=2)   # data/NAME
        remedy = (f'did you mean {" or ".join(nearest)}?' if nearest else
                  f'there are {", ".join(names)}; data/text is for a file of your own')
        fail(f'there is no data set {name!r}; {remedy}')
    return os.path.join(DATA, name)


def prepare_if_missing(name):
    """
    Runs data/<name>/prepare.py if it has not been run yet; its failure, which it has explained, ends this
    script too. Only those that came with this repository: to run the code of a folder from elsewhere is for
    its user to decide.
    """
    folder = data_folder(name)
    if not os.path.exists(os.path.join(folder, 'meta.json')):
        if name not in PREPARED_UNASKED:
            fail(f'the data set {name} is not there yet; run `python data/{name}/prepare.py` first (with '
                 '--help it lists its settings)')
        print(f'data set {name} is not there yet: running data/{name}/prepare.py', flush=True)
        done = subprocess.run([sys.executable, os.path.join(folder, 'prepare.py')])
        if done.returncode != 0:
            sys.exit(2)
    return folder
