"""
Karpathy's tiny Shakespeare, one token per character: byte for byte what nanoGPT's shakespeare_char trains on,
so that losses compare with published ones. 1,115,394 characters, 65 of them distinct; the last tenth is for
validation.

The text comes from --input, else from input.txt in the data set's folder, else from its usual place on the
network; its hash is checked.
"""
import os
import sys

sys.path.pop(0)                                 # not from this folder: its files could pass for others
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', '..'))         # the repository's root

import hashlib
import http.client
import urllib.request

from configurator import configure, fail
from dataset import CharTokenizer, write_dataset
from streams import check_file

input = ''    # path of the text, where you have it; '' looks for input.txt in the folder, then downloads it
url = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'  # text
folder = ''   # where to write; '' is this script's own folder
configure(globals(), __file__, arguments_are='')

folder = folder or os.path.dirname(os.path.abspath(__file__))
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'

kept = os.path.join(folder, 'input.txt')
path = input or (kept if os.path.exists(kept) else '')
try:
    if path:
        check_file(path, largest=10_000_000)
        with open(path, 'rb') as file:
            content = file.read()
    else:
        print(f'fetching {url} (1 MB)', flush=True)
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read(10_000_000)
except (OSError, ValueError, http.client.HTTPException) as error:           # ValueError: not a URL
    fail(f'{path or url} cannot be read ({error}); fetch the file elsewhere and give --input=PATH here')
if hashlib.sha256(content).hexdigest() != SHA256:
    fail(f'{path or url} is not tiny Shakespeare as nanoGPT has it: its sha256 is not {SHA256}; give the '
         'right --input=PATH')

text = content.decode('ascii')
split = int(len(text) * 0.9)
write_dataset(folder, text[:split], text[split:], CharTokenizer(text),
              f'tiny Shakespeare (karpathy/char-rnn on GitHub), sha256 {SHA256}; validation: the last tenth')
