"""
Your own text: any file in UTF-8. Its end is held out for validation. It is read in pieces, so that its size
does not matter.

    python data/text/prepare.py --input=FILE --tokenizer=gpt2
    python train.py config/rope.py --dataset=text
"""
import os
import sys

sys.path.pop(0)                                 # not from this folder: its files could pass for others
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', '..'))         # the repository's root

from configurator import configure, fail, share

input = ''                    # path of the text file
tokenizer = 'char'            # 'char': one token per character; 'gpt2': GPT-2's byte pair encoding
val_fraction: share = 0.1     # how much of the text, at its end, is held out for validation
folder = ''                   # where to write; '' is this script's own folder
configure(globals(), __file__, arguments_are='')

if not input:
    fail('which text? name its file: python data/text/prepare.py --input=FILE')
if tokenizer not in ('char', 'gpt2'):
    fail(f"tokenizer must be 'char' or 'gpt2', not {tokenizer!r}")

from tqdm import tqdm           # after configure(), so that --help and mistakes in flags answer at once

from dataset import FEWEST_TOKENS, BPETokenizer, CharTokenizer, write_dataset
from streams import open_text, whole_words

PIECE = 2 ** 20                 # characters in memory at a time
IF_SHORT = 'give more, or another --val_fraction'


def pieces(file, length, bar):
    """So many of the next characters of a file, in pieces."""
    while length and (piece := file.read(min(PIECE, length))):
        length -= len(piece)
        yield piece
        bar.update(file.buffer.tell() - bar.n)          # of the bytes


def encode(file, bar):
    """Reads the text twice: which characters it has, and how many; then its tokens."""
    length, characters = 0, set()
    encoder = BPETokenizer() if tokenizer == 'gpt2' else None
    for piece in pieces(file, sys.maxsize, bar):
        length += len(piece)
        characters.update(piece)
    if not ''.join(characters).strip():
        fail(f'{input} is empty; give a file with text in it')
    split = round(length * (1 - val_fraction))
    if min(split, length - split) < FEWEST_TOKENS:
        fail(f'the text is too short: training and validation need {FEWEST_TOKENS} tokens each, and have '
             f'{split} and {length - split} characters; {IF_SHORT}')
    file.seek(0)
    bar.reset()
    parts = [pieces(file, size, bar) for size in (split, length - split)]
    if tokenizer == 'gpt2':
        parts = [whole_words(part) for part in parts]
    write_dataset(folder or os.path.dirname(os.path.abspath(__file__)), *parts,
                  encoder or CharTokenizer(characters),
                  f'{os.path.basename(input)}; validation: its last {100 * val_fraction:.3g}%',
                  keep_text=False, if_short=IF_SHORT)


try:
    with open_text(input) as file, tqdm(total=os.path.getsize(input), unit='B', unit_scale=True, leave=False,
                                        disable=not sys.stderr.isatty()) as bar:
        encode(file, bar)
except UnicodeDecodeError:
    fail(f'{input} is not UTF-8; convert it, for example with `iconv -t UTF-8`')
except OSError as error:
    fail(f'{input} cannot be read ({error.strerror}); check the path')
except ValueError as error:     # the tokenizer's
    fail(error)
