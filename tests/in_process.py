"""
Runs this repository's scripts within the tests' process: what takes a mistake milliseconds takes a command seconds, which it spends on
importing PyTorch.
"""
import contextlib
import io
import os
import runpy
import signal
import sys
import warnings
from types import SimpleNamespace

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, ROOT)

import dataset

UNSEEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)       # which Python does not show to users


def run(folder, script, *arguments):
    """
    Runs `script`, a path in the repository, as a command in the working directory `folder`, on the data sets in folder/data.

    Returns code (the exit status), out and err (what was printed, warnings included) and variables (the script's globals, where it
    ran to its end). What would be a traceback is raised.
    """
    path = os.path.join(ROOT, script)
    before = sys.argv, list(sys.path), os.getcwd(), dataset.DATA, torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
    out, err, code, variables = io.StringIO(), io.StringIO(), 0, {}
    try:
        sys.argv, dataset.DATA = [path, *arguments], os.path.join(folder, 'data')
        sys.path.insert(0, os.path.dirname(path))
        os.chdir(folder)
        torch.set_num_threads(1)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter('default')
            variables = runpy.run_path(path, run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv, sys.path[:], there, dataset.DATA, threads = before
        os.chdir(there)
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for warning in shown:
        if not issubclass(warning.category, UNSEEN):
            err.write(f'{warning.category.__name__}: {warning.message}\n')
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), variables=variables)


def assert_refused(result, script, *words):
    """Exit status 2, and one line on stderr: the script's name, and what it says, in which the words occur."""
    assert result.code == 2, (result.code, result.out, result.err)
    assert result.err.endswith('\n') and len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith(os.path.basename(script) + ': ') and len(result.err) < 1000, result.err
    for word in words:
        assert word in result.err, (word, result.err)


def tree(folder):
    """Everything in a folder, {path: (size, time of its last change)}: what is written there shows."""
    found = {}
    for parent, _, files in os.walk(folder):
        for path in [parent, *(os.path.join(parent, file) for file in files)]:
            found[path] = os.path.getsize(path), os.stat(path).st_mtime_ns
    return found
