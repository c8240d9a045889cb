"""
A run as a Hugging Face folder, which transformers loads without any code of this repository:

    pip install transformers
    python export.py out/rope --to=my_folder
    python -c "from transformers import pipeline; print(pipeline('text-generation', 'my_folder')('ROMEO:'))"

learned, sinusoidal and none become a GPT-2, rope with all its scalings a GPT-NeoX, alibi an MPT: models that
compute the same. No model there computes shaw, t5 or tupe. Before it ends, the script loads the folder again
and says by how much the logits differ.
"""
import base64
import math
import os
import shutil

from configurator import configure, fail

# ------------------------------------------------------------------------------------------------------------
to = ''                         # the folder to be written, a new one
# ------------------------------------------------------------------------------------------------------------
if __name__ == '__main__':      # tests import the functions below
    settings, given, runs = configure(globals(), __file__, arguments_are='a run')

import torch

from checkpoints import checkpoint_path, load_checkpoint, make_model
from dataset import make_folder, make_tokenizer
from model import sinusoidal_table

NO_MODEL = 'no model of transformers computes it; learned, none, sinusoidal, rope and alibi can be exported'


def as_gpt2(model):
    """The config and weights of a GPT2LMHeadModel: (class name, settings, weights)."""
    config, n_positions = model.config, model.config.block_size
    if config.position == 'learned':
        table = model.transformer.wpe.weight
    else:
        n_positions *= 4                                # waves have no end, a table has
        table = torch.zeros(n_positions, config.n_embd)
        if config.position == 'sinusoidal':
            table = sinusoidal_table(torch.arange(n_positions), config.n_embd, config.sinusoidal_base)
            table *= config.sinusoidal_scale
    weights = {'transformer.wpe.weight': table}
    for name, tensor in parts_of(model):
        is_matrix = tensor.dim() == 2 and '.h.' in name
        weights[name] = tensor.T if is_matrix else tensor           # its layers multiply from the right
    dropout = dict(resid_pdrop=config.dropout, attn_pdrop=config.dropout, embd_pdrop=config.dropout)
    return 'GPT2', dict(n_positions=n_positions, n_embd=config.n_embd, n_layer=config.n_layer,
                        n_head=config.n_head, activation_function=gelu_name(config), **dropout), weights


def as_gpt_neox(model):
    """The same of a GPTNeoXForCausalLM."""
    config, scheme = model.config, model.transformer.wpe
    kind, L = config.rope_scaling, scheme.original_length
    rope = dict(rope_theta=config.rope_base, partial_rotary_factor=1.0)
    if kind == 'ntk':                                   # another base, and nothing else
        d = scheme.head_size
        rope.update(rope_type='default', rope_theta=config.rope_base * config.rope_factor ** (d / (d - 2)))
    elif kind != 'none':
        rope.update(rope_type=kind, factor=config.rope_factor, original_max_position_embeddings=L)
    if kind == 'yarn':
        rope.update(beta_fast=config.yarn_beta_fast, beta_slow=config.yarn_beta_slow, attention_factor=1.0)
    if kind == 'llama3':
        rope.update(low_freq_factor=1.0, high_freq_factor=4.0)
    length = L if kind == 'dynamic' else max(config.block_size, math.ceil(L * config.rope_factor))
    names = {'transformer.wte': 'gpt_neox.embed_in', 'transformer.ln_f': 'gpt_neox.final_layer_norm',
             'lm_head': 'embed_out', 'transformer.h': 'gpt_neox.layers', 'ln_1': 'input_layernorm',
             'ln_2': 'post_attention_layernorm', 'attn.c_attn': 'attention.query_key_value',
             'attn.c_proj': 'attention.dense', 'mlp.c_fc': 'mlp.dense_h_to_4h',
             'mlp.c_proj': 'mlp.dense_4h_to_h'}
    weights = {}
    for name, tensor in parts_of(model):
        if '.c_attn.' in name:                          # theirs has each head's q, k, v beside each other
            parts = tensor.unflatten(0, (3, config.n_head, scheme.head_size)).clone()
            parts[:2] *= scheme.attention_factor        # what YaRN multiplies cos and sin by
            if config.rope_layout == 'interleaved':     # pairs (2i, 2i + 1) there are pairs (i, i + hs/2)
                parts[:2] = torch.cat((parts[:2, :, 0::2], parts[:2, :, 1::2]), dim=2)
            tensor = parts.transpose(0, 1).flatten(0, 2)
        weights[renamed(name, names)] = tensor
    return 'GPTNeoX', dict(max_position_embeddings=length, hidden_size=config.n_embd,
                           num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
                           intermediate_size=4 * config.n_embd, hidden_act=gelu_name(config),
                           attention_dropout=config.dropout, hidden_dropout=config.dropout,
                           use_parallel_residual=False, rope_parameters=rope), weights


def as_mpt(model):
    """The same of an MptForCausalLM."""
    config = model.config
    if config.bias or config.gelu != 'exact' or config.n_head & (config.n_head - 1):
        fail('transformers has ALiBi in MPT only, without biases, with the exact GELU and a power of two '
             'heads; train with --bias=False --gelu=exact --n_head=4 to export it')
    names = {'transformer.ln_f': 'transformer.norm_f', 'transformer.h': 'transformer.blocks',
             'ln_1': 'norm_1', 'ln_2': 'norm_2', 'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj',
             'mlp.c_fc': 'ffn.up_proj', 'mlp.c_proj': 'ffn.down_proj'}
    weights = {renamed(name, names): tensor for name, tensor in parts_of(model) if not name.endswith('.bias')}
    return 'Mpt', dict(d_model=config.n_embd, n_heads=config.n_head, n_layers=config.n_layer,
                       max_seq_len=4 * config.block_size, resid_pdrop=config.dropout,
                       emb_pdrop=config.dropout), weights


WRITERS = {'learned': as_gpt2, 'none': as_gpt2, 'sinusoidal': as_gpt2, 'rope': as_gpt_neox, 'alibi': as_mpt}


def parts_of(model):
    """Its weights by name, without positions, and zeros for the biases that it does without."""
    for name, tensor in model.state_dict().items():
        if not name.startswith('transformer.wpe.'):
            yield name, tensor
            if name.endswith('.weight') and ('.h.' in name or 'ln_f' in name) and not model.config.bias:
                yield name.replace('.weight', '.bias'), torch.zeros(len(tensor))


def renamed(name, names):
    for ours, theirs in names.items():
        name = name.replace(ours + '.', theirs + '.')
    return name


def gelu_name(config):
    return 'gelu' if config.gelu == 'exact' else 'gelu_new'


def write_tokenizer(tokenizer, folder):
    """The tokenizer as transformers reads it; False where it has characters that it cannot hold."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    description = tokenizer.to_dict()
    if description['kind'] == 'gpt2':
        from transformers.convert_slow_tokenizer import TikTokenConverter
        ranks, encoding = os.path.join(folder, 'ranks'), tokenizer.encoding
        with open(ranks, 'wb') as file:                 # in tiktoken's own format
            file.writelines(base64.b64encode(token) + b' %d\n' % rank
                            for token, rank in encoding._mergeable_ranks.items())
        fast = TikTokenConverter(vocab_file=ranks, pattern=encoding._pat_str,
                                 extra_special_tokens=encoding._special_tokens).converted()
        os.remove(ranks)
    else:
        pieces = description['characters'] if description['kind'] == 'char' else description['words']
        try:
            ''.join(pieces).encode()
        except UnicodeEncodeError:                      # half a pair of code units, which is no text there
            return False
        split = r'[\s\S]' if description['kind'] == 'char' else r'\n| *[^ \n]+| +'
        fast = tokenizers.Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces)}))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(split), 'isolated')
        fast.decoder = decoders.Fuse()
    end = {'eos_token': '<|endoftext|>'} if description['kind'] == 'gpt2' else {}
    PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False,
                            **end).save_pretrained(folder)
    return True


def write_folder(model, tokenizer, folder):
    """Writes the Hugging Face folder of a model; tokenizer: the run's, or None. Returns the class's name."""
    import transformers
    family, arguments, weights = WRITERS[model.config.position](model)
    vocab_size = tokenizer.vocab_size if tokenizer else model.config.vocab_size
    embedding = next(name for name in weights if name.endswith(('.wte.weight', '.embed_in.weight')))
    for name in (embedding, 'lm_head.weight', 'embed_out.weight'):      # ids that only pad the vocabulary go
        if name in weights:
            weights[name] = weights[name][:vocab_size]
    end = 50256 if tokenizer and tokenizer.to_dict()['kind'] == 'gpt2' else None
    config = getattr(transformers, f'{family}Config')(
        vocab_size=vocab_size, tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, **arguments)
    theirs = getattr(transformers, 'GPT2LMHeadModel' if family == 'GPT2' else f'{family}ForCausalLM')(config)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    left = [name for name in missing if name not in ('lm_head.weight', 'embed_out.weight')]
    if left or set(unexpected) - {'lm_head.weight', 'embed_out.weight'}:
        fail(f'this version of transformers ({transformers.__version__}) names its weights otherwise '
             f'({(left + unexpected)[0]}); install the one in requirements-dev.txt')
    theirs.tie_weights()
    make_folder(folder)
    theirs.save_pretrained(folder)
    if tokenizer and not write_tokenizer(tokenizer, folder):
        print('no tokenizer is written: its characters are no text')
    return type(theirs).__name__


@torch.inference_mode()
def difference(model, folder, vocab_size):
    """The largest difference of logits between a model and its folder, on random tokens, a block of them."""
    from transformers import AutoModelForCausalLM
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    idx = torch.randint(vocab_size, (2, model.config.block_size), generator=torch.Generator().manual_seed(0))
    return (theirs(idx).logits - model(idx, idx)[0][..., :vocab_size]).abs().max().item()


def main():
    if len(runs) != 1:
        fail('which run? name one, as in: python export.py out/rope --to=my_folder')
    if not to:
        fail('where to? name a folder, as in: python export.py out/rope --to=my_folder')
    if os.path.lexists(to):
        fail(f'{to} is there already; choose another folder, or remove it')
    path = checkpoint_path(runs[0])
    checkpoint = load_checkpoint(path)
    if checkpoint['model_args']['position'] not in WRITERS:
        fail(f'{path} has position {checkpoint["model_args"]["position"]}: {NO_MODEL}')
    try:
        import transformers                             # noqa: F401
    except ImportError:
        fail('export.py needs transformers; run `pip install transformers`')
    try:
        tokenizer = make_tokenizer(checkpoint['tokenizer']) if 'tokenizer' in checkpoint else None
    except ValueError as error:
        fail(f'{path}: {error}')
    model = make_model(checkpoint, path).eval()
    part = f'{to.rstrip("/")}.{os.getpid()}.part'       # whole or not at all
    try:
        family = write_folder(model, tokenizer, part)
        vocab_size = tokenizer.vocab_size if tokenizer else model.config.vocab_size
        found = difference(model, part, vocab_size)
        os.rename(part, to)
    except OSError as error:
        fail(f'{to} cannot be written ({error.strerror or error}); choose another folder')
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f'{to}: a {family}, for AutoModelForCausalLM.from_pretrained({to!r}); its logits differ by at most '
          f'{found:.1e}')


if __name__ == '__main__':
    main()
