"""
GPT-2's weights, as OpenAI published them and transformers keeps them, as checkpoints of this repository:
what `--init_from=gpt2` and `python sample.py gpt2` read. transformers is imported only then.
"""
import json
import os

import torch

from checkpoints import checkpoint_path, load_checkpoint, make_config
from configurator import fail
from dataset import GPT2_VOCABULARY
from streams import open_text

SIZES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')       # 124, 350, 774 and 1,558 million parameters


def load_start(name):
    """What is read by a name, and its path: a run's checkpoint, nanoGPT's, or GPT-2's. One line if none."""
    if not os.path.exists(os.path.join(name, 'ckpt.pt')) and is_gpt2(name):
        return load_gpt2(name), name
    path = checkpoint_path(name)
    return load_checkpoint(path), path


def is_gpt2(name):
    """Whether this is one of GPT-2's names, or a folder that transformers has written of a GPT-2."""
    if name in SIZES:
        return True
    try:
        with open_text(os.path.join(name, 'config.json'), largest=2 ** 24) as file:
            return json.load(file)['model_type'] == 'gpt2'
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def load_gpt2(name):
    """A checkpoint: model, model_args and, where it is GPT-2's, tokenizer. One line where that cannot be."""
    try:
        from transformers import GPT2LMHeadModel, logging
    except ImportError:
        fail(f'{name} is read by transformers; run `pip install transformers`')
    logging.disable_progress_bar()
    try:
        model = GPT2LMHeadModel.from_pretrained(name, dtype=torch.float32)
    except Exception as error:                          # the network's and damaged files' have many classes
        by_hand = (f'where there is network, GPT2LMHeadModel.from_pretrained({name!r}).save_pretrained('
                   '"folder") writes a folder: bring it here and name that')
        fail(f'{name} cannot be read ({str(error).splitlines()[0][:200]}); '
             + (by_hand if name in SIZES else 'check the folder, or name another'))
    config, kinds = model.config, {'gelu': 'exact', 'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh'}
    if (config.activation_function not in kinds or config.n_inner not in (None, 4 * config.n_embd)
            or config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights
            or config.add_cross_attention or config.layer_norm_epsilon != 1e-5):
        fail(f'{name} is a GPT-2 with settings that this GPT does not have; name another')
    transposed = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')      # its layers multiply from the right
    weights = {key: tensor.T.contiguous() if key.endswith(transposed) else tensor
               for key, tensor in model.state_dict().items()}
    args = dict(block_size=config.n_positions, vocab_size=config.vocab_size, n_layer=config.n_layer,
                n_head=config.n_head, n_embd=config.n_embd, dropout=0.0, bias=True, position='learned',
                gelu=kinds[config.activation_function])
    tokenizer = {'tokenizer': {'kind': 'gpt2'}} if config.vocab_size == GPT2_VOCABULARY else {}
    return dict(model=weights, model_args=vars(make_config(args)), **tokenizer)
