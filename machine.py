"""
The machine that a script runs on: its devices, its number formats, several processes under torchrun, and
signals.
"""
import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading

import torch
import torch.distributed
from tqdm import tqdm

from configurator import HERE, fail

END_WITH_STDIN = 'END_WITH_STDIN'       # the name in the environment, see end_with_stdin()
LOCKS = []                              # what lock() holds: open files, which the system closes in the end
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def pick_device(name):
    """The torch device of a name; 'auto' takes CUDA, else MPS, else the CPU. One line if there is none."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == 'auto':
        return torch.device('cuda' if cuda else 'mps' if mps else 'cpu')
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ('cpu', 'cuda', 'mps'):
        fail(f'there is no device {name!r}; use auto, cpu, cuda, cuda:0 or mps')
    if device.type == 'cuda' and not cuda or device.type == 'mps' and not mps:
        fail(f'device {name!r} was asked for, but PyTorch finds no {device.type.upper()} GPU here; use '
             '--device=cpu')
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        fail(f'device {name!r} was asked for, but there are only {torch.cuda.device_count()} GPUs; count '
             'from cuda:0')
    return device


def autocast(device, dtype):
    """The context in which forward passes run: matrix products in `dtype`; for float32 none."""
    if dtype not in DTYPES:
        fail(f'dtype must be one of {", ".join(DTYPES)}, not {dtype!r}')
    return contextlib.nullcontext() if dtype == 'float32' else torch.autocast(device.type, DTYPES[dtype])


def choose_kernels(device, deterministic=False):
    """How PyTorch computes on a GPU: in TF32, where it can; if asked for, always in the same order."""
    if device.type == 'cuda':
        torch.set_float32_matmul_precision('high')
    if deterministic:                                   # slower in places, and an error where that cannot be
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')     # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def machine_name():
    """What computes: the GPU's name, or the processor's, as far as it is known."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as file:
        for line in file:
            if line.startswith('model name'):
                return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()


def git_commit(folder=HERE):
    """The commit of a repository's top folder, and '-dirty' if files differ; '' for any other folder."""
    def git(*words):
        return subprocess.run(['git', *words], capture_output=True, text=True, cwd=folder).stdout.strip()
    try:
        if os.path.realpath(git('rev-parse', '--show-toplevel') or '/') != os.path.realpath(folder):
            return ''                                   # unpacked inside another repository, or in none
        return git('describe', '--always', '--dirty', '--abbrev=40')
    except OSError:                                     # no git here
        return ''


# ------------------------------------------------------------------------------------------------------------
# several processes

def rank_and_world_size():
    """Which of how many processes this is: torchrun says so; (0, 1) without it."""
    return int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))


def connect(device, backend=None):
    """Connects the processes, if there are several; returns this one's device. backend None: what fits."""
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return device
    if device.type == 'cuda':
        device = pick_device(f'cuda:{os.environ.get("LOCAL_RANK", 0)}')
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(backend or ('nccl' if device.type == 'cuda' else 'gloo'))
    except (RuntimeError, ValueError) as error:
        fail(f'the {world_size} processes cannot be connected ({str(error).splitlines()[0]}); start them by '
             'torchrun, see --help')
    return device


def wait_for_all():
    """Returns when all processes have come here."""
    if rank_and_world_size()[1] > 1:
        torch.distributed.barrier()


def sum_over_processes(device, *numbers):
    """The sum of each number over all processes."""
    if rank_and_world_size()[1] == 1:
        return numbers
    dtype = torch.float32 if device.type == 'mps' else torch.float64
    total = torch.tensor(numbers, dtype=dtype, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def say(text):
    """Prints once, whatever the number of processes, and around a progress bar."""
    if rank_and_world_size()[0] == 0:
        tqdm.write(text)


def lock(folder):
    """Keeps a folder for this process until it ends, be it by a kill. One line if another process has it."""
    with contextlib.suppress(ImportError, OSError):     # there may be no locks here
        import fcntl
        LOCKS.append(os.open(folder, os.O_RDONLY))
        try:
            fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f'another process is writing to {folder}; wait for its end, or choose another --out_dir')


def end_with_stdin():
    """
    Where the environment asks for it, the end of stdin is a SIGTERM to this process. So trainings end with
    the compare.py that started them, whatever ends it: it keeps the other end of their stdin.
    """
    def wait():
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    if END_WITH_STDIN in os.environ:
        threading.Thread(target=wait, daemon=True).start()


class StopRequest:
    """
    Ctrl-C and SIGTERM, from here on: `signal` is the number of what has come, 0 until then. Within
    `with at_once(act)`, where nothing is lost by it, they call act() as they come, or at its beginning.
    """

    def __init__(self):
        self.signal, self.act = 0, lambda: None
        signal.signal(signal.SIGINT, self.receive)
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, number, frame):
        if self.signal and number == signal.SIGINT:
            os._exit(128 + number)      # Ctrl-C again: at once, by no exception that a file's writer reports
        first, self.signal = not self.signal, number    # SIGTERM often comes twice to each of a job
        if first:
            self.act()

    @contextlib.contextmanager
    def at_once(self, act):
        self.act = act
        if self.signal:
            act()
        yield
        self.act = lambda: None
