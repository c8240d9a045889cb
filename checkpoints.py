"""
Checkpoints: reading what may be damaged, made up, or of another run, and making models of it.

Only what was read whole and found wrong is called damaged; whatever else keeps a file from being read is
named as it is, since the file may be the only copy.
"""
import errno
import glob
import hashlib
import json
import math
import os
import pickle
import warnings
import zipfile
from types import SimpleNamespace

import torch

from configurator import fail, out_of_memory
from machine import say
from model import GPT, SCHEMES, GPTConfig
from streams import open_text

DIGESTED = ('model', 'optimizer', 'batch_generator')    # parts of a checkpoint, each with a hash of its own
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGEST = 1e15                  # of a model's numbers: beyond it RoPE's arithmetic has no digits left
DEEPEST = 10                    # dictionaries and lists in each other; train.py's checkpoints have 5
DIRECTORY = 0x10                # the mark of a directory among a zip member's attributes


# ------------------------------------------------------------------------------------------------------------
# files

def own_checkpoints(folder):
    """The paths of the checkpoints of the run in a folder, first the one to go on with."""
    paths = [os.path.join(folder, file) for file in ('last.pt', 'ckpt.pt')]
    return [path for path in paths if os.path.exists(path)]


def other_checkpoints(folder):
    """The paths of what may be a checkpoint in a folder, but is not called as train.py calls it."""
    return sorted(path for path in glob.glob(os.path.join(glob.escape(folder), '*.pt'))
                  if os.path.basename(path) not in ('last.pt', 'ckpt.pt'))


def checkpoint_path(run):
    """The best checkpoint of a run, from its folder; or the checkpoint itself, where that is named."""
    return run if run.endswith('.pt') else os.path.join(run, 'ckpt.pt')


def check_archive(file):
    """Reads a zip file whole: BadZipFile unless it is sound. It may unpack to no more than its own size."""
    if file.read(4) == b'PK\3\4':                       # as all but old ones begin
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if (size > os.fstat(file.fileno()).st_size
                    or any(member.external_attr & DIRECTORY for member in members)  # torch would read nothing
                    or archive.testzip() is not None):  # check sums, which torch.load ignores
                raise zipfile.BadZipFile
    file.seek(0)


def digest(part):
    """A hash of all tensors in a part of a checkpoint: of their names, types, shapes and bytes."""
    total = hashlib.sha256()

    def add(name, value):
        if isinstance(value, torch.Tensor):
            total.update(f'{name} {value.dtype} {tuple(value.shape)} '.encode())
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(value, (dict, list, tuple)):
            for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                add(f'{name}/{key}', entry)

    add('', part)
    return total.hexdigest()


def too_deep(value, levels=DEEPEST):
    """Whether a value nests deeper than so many levels, as one that holds itself does."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return bool(parts) and (levels == 0 or any(too_deep(part, levels - 1) for part in parts))


def load_checkpoint(path, device='cpu', remedy='take it from another copy, or train again'):
    """
    A checkpoint of train.py's (or nanoGPT's), unpickled by a loader that knows tensors and plain values only.
    One line on faults, with the remedy in it.
    """
    if os.path.isdir(path):
        fail(f'{path} is a directory; name the checkpoint in it')
    if not os.path.exists(path):
        renamed = other_checkpoints(os.path.dirname(path) or '.')
        fail(f'there is no checkpoint {path}; ' + (f'there is {renamed[0]}: name that' if renamed else
                                                   'train a run first, or check the path'))
    if not os.path.isfile(path):
        fail(f'{path} is no regular file; check the path')
    try:
        with open(path, 'rb') as file, warnings.catch_warnings():
            warnings.simplefilter('ignore')             # of what an error will follow: one line is enough
            check_archive(file)
            checkpoint = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:                          # damage shows in many ways
        if out_of_memory(error):
            fail(f'{path} does not fit into memory; end other programs, or use a machine with more')
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a damaged file's offsets
            fail(f'{path} cannot be read ({os.strerror(error.errno)}), though it may be whole; see to that')
        if isinstance(error, pickle.UnpicklingError):
            fail(f'{path} holds more than tensors and plain values, or is damaged, and is not opened; '
                 f'{remedy}')
        fail(f'{path} cannot be read (it is cut short or damaged); {remedy}')
    if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get('model'), dict)
            and isinstance(checkpoint.get('model_args'), dict)):
        fail(f'{path} is no checkpoint of a GPT: it lacks model or model_args; {remedy}')
    if too_deep(checkpoint):
        fail(f'{path} is no checkpoint of a GPT: it is nested beyond reason; {remedy}')
    digests = checkpoint.get('digests')                 # old ones have none
    for part in DIGESTED if isinstance(digests, dict) else ():
        if part in checkpoint and part in digests and digest(checkpoint[part]) != digests[part]:
            fail(f'{path} is damaged: its {part} is not what was written; {remedy}. (Was it changed on '
                 "purpose? Then delete its entry 'digests', too.)")
    try:
        checkpoint['model_args'] = vars(make_config(checkpoint['model_args']))
    except ValueError as error:
        fail(f'{path} describes a model that cannot be: {error}; {remedy}')
    loss = checkpoint.get('best_val_loss', math.inf)
    loss = loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss        # nanoGPT's
    if type(loss) not in (int, float) or math.isnan(loss):
        fail(f'{path} is no checkpoint of a GPT: its best_val_loss cannot be {loss!r}; {remedy}')
    if 'best_val_loss' in checkpoint:
        checkpoint['best_val_loss'] = float(loss)
    check_its_run(checkpoint, path)
    return checkpoint


def check_its_run(checkpoint, path):
    """One line if a checkpoint is of another run than the config.json beside it, where that is train.py's."""
    beside = os.path.join(os.path.dirname(path), 'config.json')
    try:
        with open_text(beside, largest=2 ** 24) as file:
            config = json.load(file)
        told = SimpleNamespace(mark=config.get('run'), data=config['data'], seed=config['settings']['seed'],
                               model_args=vars(make_config(config['model_args'])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return                  # none, or none of train.py's, or damaged, which others say
    settings = checkpoint.get('config')
    held = SimpleNamespace(mark=checkpoint.get('run'), data=checkpoint.get('data'), seed=None,
                           model_args=checkpoint['model_args'])
    if isinstance(settings, dict):
        held.seed = settings.get('seed')
    for name, words in (('model_args', 'models'), ('seed', 'seeds'), ('data', 'data'), ('mark', 'runs')):
        values = getattr(told, name), getattr(held, name)
        if None not in values and values[0] != values[1]:
            fail(f'{path} and {beside} are of different {words}; put back what belongs there, or move '
                 'one of them to a folder of its own')


# ------------------------------------------------------------------------------------------------------------
# models

def make_config(model_args):
    """A GPTConfig of settings that may be a stranger's. ValueError, with one sentence, if there is none."""
    try:
        config = GPTConfig(**model_args)
    except (TypeError, ArithmeticError, RuntimeError, RecursionError) as error:
        if out_of_memory(error):
            raise
        raise ValueError(str(error)) from None
    for name, value in vars(config).items():
        if isinstance(value, float) and value > LARGEST:
            raise ValueError(f'{name} cannot be {value}')
    if not config.causal:
        raise ValueError('causal=False reads what it is to predict')
    return config


def weights_of(checkpoint):
    """Its weights by the names of ours: torch.compile and nanoGPT leave their marks. ValueError if none."""
    weights = {}
    for name, tensor in checkpoint['model'].items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError('its weights are not tensors with names')
        if not name.endswith(('.attn.bias', '.attn.masked_bias')):
            if tensor.dtype not in FLOATS or tensor.layout != torch.strided or tensor.is_meta:
                raise ValueError(f'{name} holds no floating-point numbers, but {tensor.dtype}')
            if not tensor.isfinite().all():
                raise ValueError(f'{name} is not finite: it holds NaN or infinity')
            weights[name.removeprefix('_orig_mod.')] = tensor
    return weights


def make_model(checkpoint, path, **changes):
    """
    The model of a checkpoint, with some of its settings changed, such as rope_scaling='yarn'; or where that
    is None a new one, of these settings. One line where that cannot be, before any memory is taken.
    """
    try:
        config = make_config({**(checkpoint['model_args'] if checkpoint else {}), **changes})
        weights = weights_of(checkpoint) if checkpoint else None
    except ValueError as error:
        fail(f'{path}: {error}' + '; take it from another copy, or train again' * (checkpoint is not None))
    if checkpoint:
        fit_positions(weights, checkpoint['model_args'], config, path)
        misfit = f'its {len(weights)} weights are too few for {config.n_layer} layers'
        if config.n_layer <= len(weights):
            misfit = why_not(config, weights)
        if misfit:
            fail(f'{path}: its weights do not fit a model with these settings ({misfit[:150]}); leave out '
                 'what changes its sizes')
    try:
        model = GPT(config)
    except RuntimeError:        # PyTorch could not allocate it
        fail('a model of these sizes does not fit into memory; choose smaller ones')
    if checkpoint:
        model.load_state_dict(weights)
    return model


def fit_positions(weights, before, config, path):
    """
    Makes a checkpoint's weights fit a model with other positions, in place: another scheme's own parameters
    start anew, and a learned table is cropped to a shorter block. One line for a longer one.

    before: the model_args of the checkpoint
    """
    own, scheme = 'transformer.wpe.', SCHEMES[config.position](config)
    position = before.get('position', 'learned')        # nanoGPT's do not say
    names = [name for name in weights if name.startswith(own)]
    if config.position != position:
        dropped = sum(weights.pop(name).numel() for name in names)
        scheme.init_weights()
        weights.update({own + name: tensor for name, tensor in scheme.state_dict().items()})
        say(f'{path}: position {config.position} takes the place of {position}'
            + f', whose {dropped:,} parameters are dropped' * bool(dropped))
    elif scheme.longest < math.inf:
        for name in names:
            if len(weights[name]) < scheme.longest:
                fail(f'{path} has a table of {len(weights[name])} positions, so block_size cannot be '
                     f'{config.block_size}; choose at most that, or another scheme, as in --position=rope')
            weights[name] = weights[name][:scheme.longest].clone()


def why_not(config, weights):
    """What keeps a model from taking weights, by its sizes alone; '' if nothing does."""
    try:
        with torch.device('meta'), warnings.catch_warnings():       # which allocates nothing
            warnings.simplefilter('ignore')                         # of weights that go nowhere
            model = GPT(config)
            model.load_state_dict(weights)
    except RuntimeError as error:
        return str(error).splitlines()[-1].strip()
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // tensor.element_size()
              for tensor in weights.values()}
    needed = sum(parameter.numel() for parameter in model.parameters())
    found = sum(stored.values())
    return '' if needed <= found else f'of {needed:,} numbers it stores {found:,}'
