"""The numbers in docstrings are right: `>>>` lines run as doctests."""
import doctest
import importlib

import pytest


@pytest.mark.parametrize('name', ['model', 'optim', 'tables'])
def test_examples_in_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        pytest.skip(f'there is no {name}.py')
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).failed == 0
