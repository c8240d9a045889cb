"""
What a run is to be. Three sources leave nothing open: what is asked for, what the run says that it starts
from, and what fits the machine. Then the checks: of settings together, of the folder, and of the data.
"""
import math
import os
from types import SimpleNamespace

import torch

from checkpoints import checkpoint_path, load_checkpoint, make_config, other_checkpoints, own_checkpoints
from configurator import fail
from dataset import name_of_data
from machine import lock, rank_and_world_size
from model import GPTConfig
from pretrained import is_gpt2, load_start
from runs import COLUMNS, FILES, check_free, checked, need_folder

# What None stands for: on a GPU nanoGPT's baby GPT; elsewhere what gives its best in three minutes on two
# cores.
FITS = {
    'cuda': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2,
                 optimizer='adamw', learning_rate=1e-3, max_iters=5000, warmup_iters=100, min_lr=1e-4,
                 eval_interval=250, dtype='bfloat16', compile=True),
    'cpu': dict(n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, dropout=0.0,
                optimizer='muon', learning_rate=3e-3, max_iters=1300, warmup_iters=30, min_lr=0.0,
                eval_interval=130, dtype='float32', compile=False),
}
OF_THE_COMMAND = ('out_dir', 'init_from', 'overwrite', 'eval_only')     # said anew whenever a run goes on
# What may differ when a run goes on; a change of any other setting would make it another run.
FREE_TO_CHANGE = (*OF_THE_COMMAND, 'dataset', 'max_iters', 'lr_decay_iters', 'eval_interval', 'log_interval',
                  'wandb_log', 'wandb_project', 'wandb_run_name', 'device', 'dtype', 'compile', 'backend',
                  'deterministic')


def settle(settings, given, device):
    """
    Every setting of a run: what is given, else what the run has that it starts from, else the default, or
    where that is None what fits the device. Writes nothing. One line for what cannot be.

    settings, given    as from configure(): with the defaults, and what was asked for

    Returns settings, model_args (all but vocab_size), resuming, source (the checkpoint to start from, or
    None), source_path, and remedy (what to do if that is damaged).
    """
    fits = FITS.get(device.type, FITS['cpu'])
    given = {name: value for name, value in given.items() if value is not None}
    resuming = settings['init_from'] == 'resume'
    inherited, source, path, remedy = {}, None, None, ''
    if resuming:
        source, path, remedy = load_to_resume(settings['out_dir'], settings['eval_only'])
        before = source['config']
        inherited = {name: before[name] for name in settings if name in before and name not in OF_THE_COMMAND}
        for name in inherited.keys() & given.keys() - set(FREE_TO_CHANGE):
            if given[name] != before[name]:
                fail(f'{settings["out_dir"]} was run with {name}={before[name]!r}, not {given[name]!r}; '
                     'resume it without that, or start a run with another --out_dir')
        given['init_from'] = before['init_from']        # how the run began, not how it goes on
        name = given.get('dataset', before['dataset'])
        if (found := name_of_data(source['data'], name)) != name:       # renamed, or moved
            fail(f'the data that {settings["out_dir"]} was run on are not in the data set {name}, but in '
                 f'{found}; add --dataset={found}')
    elif settings['init_from'] != 'scratch':
        name = settings['init_from']
        if not os.path.exists(checkpoint_path(name)) and not is_gpt2(name):
            fail("init_from must be 'scratch', 'resume', the folder of a trained run, or GPT-2 (gpt2, "
                 f'gpt2-medium, .. or a folder of it); there is no {checkpoint_path(name)} for {name!r}')
        source, path = load_start(name)
        inherited = {name: value for name, value in source['model_args'].items() if name in settings}
        if given.get('position', inherited['position']) != inherited['position']:     # its options go with it
            inherited.update(rope_scaling='none', rope_factor=1.0, rope_original_length=None)
        trained_length = inherited['rope_original_length'] or inherited['block_size']
        if 'rope_scaling' in given:
            inherited['rope_original_length'] = trained_length
        if 'rope_factor' in given:
            inherited['block_size'] = int(trained_length * given['rope_factor'])
        block_size = given.get('block_size', inherited['block_size'])   # a step of as many tokens as usual:
        inherited['batch_size'] = max(1, fits['batch_size'] * fits['block_size'] // block_size)

    fitting = {name: value for name, value in fits.items() if settings[name] is None}
    settings = {**settings, **fitting, **inherited, **given}
    if fits is FITS['cpu']:                             # a GPU's rates have not been tried
        for name in {'learning_rate', 'muon_learning_rate'} - inherited.keys() - given.keys():
            settings[name] *= settings['cpu_rate']
    settings['lr_decay_iters'] = settings['lr_decay_iters'] or settings['max_iters']
    if (settings['dtype'] == 'bfloat16' and device.type == 'cuda'
            and not torch.cuda.is_bf16_supported(including_emulation=False)):   # a T4 emulates it, slowly
        settings['dtype'] = 'float16'
    model_args = {name: settings[name] for name in GPTConfig.declared() if name in settings}
    check_settings(settings, model_args, device)
    return SimpleNamespace(settings=settings, model_args=model_args, resuming=resuming, source=source,
                           source_path=path, remedy=remedy)


def load_to_resume(folder, only_read):
    """
    The checkpoint with which a run goes on, its path, and what to do if it is damaged. Unless it is only to
    be read, from here on no other process can write to the folder.
    """
    there = own_checkpoints(folder)
    if not there:
        renamed = other_checkpoints(folder)
        fail(f'{folder} holds no run to resume; ' + (
            f'{renamed[0]} may be one: call it last.pt again' if renamed else
            'leave out --init_from=resume to start one, or name its folder with --out_dir'))
    if not only_read and rank_and_world_size()[0] == 0:
        lock(folder)
    remedy = 'start the run again' if len(there) == 1 else f'delete it: resuming then goes on from {there[1]}'
    source = load_checkpoint(there[0], remedy=remedy)
    kinds = dict(config=dict, optimizer=list, scaler=dict, batch_generator=torch.Tensor, iter_num=int,
                 seconds=float, log=list, data=dict, loss_sum=float, loss_count=int)
    if not all(isinstance(source.get(key), kind) for key, kind in kinds.items()):
        fail(f"{there[0]} is not a run of train.py's to go on with; start another from its weights with "
             f'--init_from={folder}')
    try:
        checked(dict(settings=source['config'], model_args=source['model_args'], data=source['data']))
        check_numbers(source)
    except (TypeError, ValueError) as error:
        fail(f'{there[0]} is damaged: {error}; {remedy}')
    return source, there[0], remedy


def check_numbers(source):
    """ValueError, with one sentence, for numbers of a checkpoint that no run comes to."""
    steps, number = source['iter_num'], (int, float)
    if type(steps) is not int or steps < 0 or not 0 <= source['seconds'] < math.inf:
        raise ValueError(f'it cannot stand at step {steps!r} after {source["seconds"]!r} seconds')
    if type(source['loss_count']) is not int or source['loss_count'] < 0 or math.isnan(source['loss_sum']):
        raise ValueError('its sum of losses is none')
    if not isinstance(source.get('wandb_id'), (str, type(None))):
        raise ValueError('its wandb_id is no text')
    if not all(type(value) in number for value in source['scaler'].values()):
        raise ValueError('its scaler holds more than numbers')
    before = -1
    for row in source['log']:
        if (not isinstance(row, (list, tuple)) or len(row) != len(COLUMNS) or type(row[0]) is not int
                or not before < row[0] <= steps
                or not all(type(entry) in number or column == 'train_loss' and entry == ''
                           for column, entry in zip(COLUMNS, row))):
            raise ValueError('its log has a row that is none')
        before = row[0]


def check_settings(settings, model_args, device):
    """One line for settings that do not go together; the limits of single ones: where they are declared."""
    chosen, world_size = SimpleNamespace(**settings), rank_and_world_size()[1]
    if chosen.optimizer not in ('adamw', 'muon'):
        fail(f"optimizer must be 'adamw' or 'muon', not {chosen.optimizer!r}")
    for name in ('position_rate', 'cpu_rate'):
        if settings[name] == 0:
            fail(f'{name} must be above 0, or nothing would be learned')
    if chosen.min_lr > chosen.learning_rate:
        fail(f'min_lr {chosen.min_lr} must not be above learning_rate {chosen.learning_rate}; lower it too')
    if device.type == 'cpu' and chosen.dtype == 'float16':
        fail('dtype float16 is not for training on a CPU; use float32 or bfloat16')
    if chosen.gradient_accumulation_steps % world_size:
        fail(f'gradient_accumulation_steps {chosen.gradient_accumulation_steps} must be a multiple of the '
             f'{world_size} processes that share them')
    try:
        make_config(model_args)
    except ValueError as error:
        fail(error)
    if (parameters := 12 * chosen.n_layer * chosen.n_embd ** 2) > 1e11:
        fail(f'{chosen.n_layer} layers of width {chosen.n_embd} have {parameters:.0e} parameters; choose a '
             'smaller n_layer or n_embd')
    if (tokens := chosen.gradient_accumulation_steps * chosen.batch_size * chosen.block_size) > 2 ** 30:
        fail(f'a step would read {tokens:,} tokens; choose a smaller batch_size, gradient_accumulation_steps '
             'or block_size')


def check_place(start):
    """One line unless the run that settle() found may be written to its out_dir, or is there to be scored."""
    folder = start.settings['out_dir']
    if start.settings['eval_only']:
        if start.source is None:
            fail('eval_only scores a run: name it with --init_from=out/NAME, or use --init_from=resume')
        return
    need_folder(folder)
    for path in (os.path.join(folder, file) for file in FILES):
        if os.path.isdir(path):
            fail(f'{path} is a directory, where the run is to write a file; move it away, or choose another '
                 '--out_dir')
    if not start.resuming:
        check_free(folder, start.settings['overwrite'])


def check_data(start, data):
    """One line unless the run that settle() found can be trained on a Dataset."""
    name, block_size, source = start.settings['dataset'], start.settings['block_size'], start.source or {}
    for split in ('train', 'val'):
        if len(data.tokens(split)) <= block_size:
            fail(f'the {split} part of {name} has {len(data.tokens(split))} tokens: block_size must be below '
                 f'that, not {block_size}')
    if source.get('tokenizer', data.meta['tokenizer']) != data.meta['tokenizer']:
        fail(f'{start.source_path} was trained with another tokenizer than the data set {name}; use the data '
             'set that it was trained on')
    if start.resuming and source['data'] != data.meta['sha256']:
        fail(f'{name} has been prepared anew, or is another data set than {start.settings["out_dir"]} was '
             'run on; prepare that one, or start a new run')
