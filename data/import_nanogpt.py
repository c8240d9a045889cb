"""
nanoGPT's data folders as data sets of this repository: train.bin and val.bin are the same, and meta.json is
made of meta.pkl, or where there is none for GPT-2's tokenizer, as nanoGPT has it. Nothing else is written.

    python data/import_nanogpt.py ../nanoGPT/data/shakespeare_char
    python train.py config/rope.py --dataset=../nanoGPT/data/shakespeare_char

meta.pkl is never executed: it is read by an unpickler that knows dictionaries, text and whole numbers alone.
"""
import hashlib
import io
import json
import os
import pickle
import pickletools
import sys

sys.path.pop(0)                                 # not from this folder: its files could pass for others
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))               # the repository's root

from configurator import configure, fail

LARGEST = 2 ** 24               # bytes of a meta.pkl
PIECE = 2 ** 20                 # tokens in memory at a time
_, _, folders = configure(globals(), __file__, arguments_are='a folder')

import numpy as np              # after configure(), so that --help and mistakes in flags answer at once

from dataset import FEWEST_TOKENS, BPETokenizer, CharTokenizer, write_whole


class PlainUnpickler(pickle.Unpickler):
    """Knows what needs no code: whatever a pickle asks to import, it does not get."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'it asks for {module}.{name}')


def plain(content):
    """What a pickle of dictionaries, text and numbers holds. An error, of many kinds, if it is another."""
    for code, argument, _ in pickletools.genops(content):
        if code.name.endswith('PUT') and argument > len(content):    # would make room for so many
            raise pickle.UnpicklingError('it numbers more than it holds')
    return PlainUnpickler(io.BytesIO(content)).load()


def characters_of(path):
    """The vocabulary in nanoGPT's meta.pkl, in the order of its ids."""
    try:
        with open(path, 'rb') as file:
            content = file.read(LARGEST + 1)
        meta = plain(content) if len(content) <= LARGEST else None
        itos = meta['itos']
        characters = [itos[id] for id in range(len(itos))]
        if not all(type(one) is str and len(one) == 1 for one in characters) or not characters:
            raise ValueError
    except OSError as error:
        fail(f'{path} cannot be read ({error.strerror}); check the path')
    except Exception:                           # a damaged or malicious pickle fails in many ways
        fail(f'{path} is not what nanoGPT writes, {{"itos": {{id: character}}, ..}}, or is damaged, and is '
             'not executed; prepare the text anew by data/text/prepare.py')
    if characters != sorted(set(characters)):
        fail(f'{path} does not number characters by code point, as nanoGPT does; prepare the text anew by '
             'data/text/prepare.py')
    return ''.join(characters)


def open_tokens(path):
    """The ids in a .bin file, as an array on disk. One line if there are too few, or none."""
    try:
        tokens = np.memmap(path, dtype='<u2', mode='r')
    except (OSError, ValueError) as error:              # none, empty, or of half a token
        fail(f"{path} cannot be read ({error}); name a data folder of nanoGPT's")
    if len(tokens) < FEWEST_TOKENS:
        fail(f'{path} has {len(tokens)} tokens and needs {FEWEST_TOKENS}; prepare a longer text')
    return tokens


def main():
    if len(folders) != 1:
        fail('which folder? name one, as in: python data/import_nanogpt.py ../nanoGPT/data/shakespeare_char')
    folder = folders[0]
    path, pickled = os.path.join(folder, 'meta.json'), os.path.join(folder, 'meta.pkl')
    if os.path.lexists(path):
        fail(f'{path} is there already, so it is a data set: --dataset={folder}')
    tokens = {name: open_tokens(os.path.join(folder, name)) for name in ('train.bin', 'val.bin')}
    most, has_meta = max(ids.max() for ids in tokens.values()), os.path.lexists(pickled)
    if not has_meta and most < 256:                     # GPT-2's first 256 are single bytes
        fail(f"{folder} has no id above {most}, so its tokens are not GPT-2's; bring its meta.pkl, or run "
             'its prepare.py again')
    try:
        tokenizer = CharTokenizer(characters_of(pickled)) if has_meta else BPETokenizer()
    except ValueError as error:
        fail(error)
    if most >= tokenizer.vocab_size:
        fail(f'{folder} has the id {most}, beyond the {tokenizer.vocab_size:,} tokens of '
             + ('its meta.pkl' if has_meta else 'GPT-2, and no meta.pkl')
             + '; prepare the text anew by data/text/prepare.py')
    counts, hashes = {}, {name: hashlib.sha256() for name in ('text', *tokens)}
    for name, ids in tokens.items():
        counts[name] = len(ids)
        for begin in range(0, len(ids), PIECE):
            hashes[name].update(ids[begin:begin + PIECE].tobytes())
            hashes['text'].update(tokenizer.decode_bytes(ids[begin:begin + PIECE]))
    meta = dict(tokenizer=tokenizer.to_dict(), vocab_size=tokenizer.vocab_size,
                train_tokens=counts['train.bin'], val_tokens=counts['val.bin'],
                source=f'{os.path.basename(os.path.abspath(folder))}, by nanoGPT',
                sha256={name: found.hexdigest() for name, found in hashes.items()})
    write_whole(path, lambda file: file.write((json.dumps(meta, indent=1) + '\n').encode('ascii')))
    print(f'{path}: {counts["train.bin"]:,} training tokens, {counts["val.bin"]:,} validation tokens, '
          f'vocabulary of {tokenizer.vocab_size:,}')


if __name__ == '__main__':
    main()
