"""
Your own text: any file in UTF-8. Its end is held out for validation.

    python data/text/prepare.py --input=FILE --tokenizer=gpt2
    python train.py config/rope.py --dataset=text
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', '..'))         # the repository's root

from configurator import configure, fail, share
from dataset import BPETokenizer, CharTokenizer, write_dataset

input = ''                    # path of the text file
tokenizer = 'char'            # 'char': one token per character; 'gpt2': GPT-2's byte pair encoding
val_fraction: share = 0.1     # how much of the text, at its end, is held out for validation
folder = ''                   # where to write; '' is this script's own folder
configure(globals(), __file__, arguments_are='')

if not input:
    fail('which text? name its file: python data/text/prepare.py --input=FILE')
if tokenizer not in ('char', 'gpt2'):
    fail(f"tokenizer must be 'char' or 'gpt2', not {tokenizer!r}")
try:
    with open(input, 'rb') as file:
        text = file.read().decode('utf-8-sig')              # -sig: a byte order mark at the start is no text
except UnicodeDecodeError as error:
    fail(f'{input} is not UTF-8 (byte {error.start:,}); convert it, for example with `iconv -t UTF-8`')
except OSError as error:
    fail(f'{input} cannot be read ({error.strerror}); check the path')
except ValueError as error:                                 # a null byte in the path
    fail(f'{input!r} is no path ({error}); check the path')
text = text.replace('\r\n', '\n')
if not text.strip():
    fail(f'{input} is empty; give a file with text in it')

try:
    encoder = BPETokenizer() if tokenizer == 'gpt2' else CharTokenizer(text)
except ValueError as error:
    fail(error)
split = round(len(text) * (1 - val_fraction))
write_dataset(folder or os.path.dirname(os.path.abspath(__file__)), text[:split], text[split:], encoder,
              f'{os.path.basename(input)}; validation: its last {100 * val_fraction:.3g}%', keep_text=False)
