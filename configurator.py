"""
Settings, in nanoGPT's manner. A script keeps its settings as plain assignments at its top, each with a trailing comment:

    learning_rate = 1e-3   # AdamW's peak learning rate
    n_layer: int = None    # number of blocks; None fits the machine

and calls `configure(globals(), __file__)` below them. Then

    python train.py config/rope.py config/small.py --batch_size=32 --compile=False

reads the files in turn, then the flags (`--key=value` or `--key value`); later ones win. A setting keeps the type of its default;
one that may also be None says so by an annotation. Unlike nanoGPT's, nothing here is executed: a config file may hold assignments
of literals and simple arithmetic, and anything else in it is refused with its line number.
"""
import ast
import difflib
import math
import operator
import os
import re
import sys
import time
import tokenize
import warnings
from collections import namedtuple

Configuration = namedtuple('Configuration', 'settings given arguments')     # what configure() returns: see there


def fail(message):
    """Ends the script on a user's mistake: one line on stderr that names the fault and the remedy, exit status 2."""
    if os.environ.get('LOCAL_RANK', '0') != '0':        # under torchrun a mistake that all processes see is said by the first alone:
        time.sleep(3)                                   # when it has ended, torchrun ends the others
    print(f'{os.path.basename(sys.argv[0])}: {" ".join(str(message).splitlines())}', file=sys.stderr)
    sys.exit(2)


def explain(kind, error, traceback):
    """What Python calls instead of printing a traceback (see sys.excepthook): two faults that any moment may bring get one line."""
    if kind is KeyboardInterrupt:
        print('stopped', file=sys.stderr)
    elif kind.__name__ == 'OutOfMemoryError' or issubclass(kind, (MemoryError, RuntimeError)) and "can't allocate memory" in str(error):
        fail('there is not enough memory for these sizes; choose a smaller batch_size (with more gradient_accumulation_steps), window or '
             'model')
    else:
        sys.__excepthook__(kind, error, traceback)


def cut(text):
    """The text for an error message, short."""
    return text if len(text) <= 60 else text[:60] + '...'


# ----------------------------------------------------------------------------------------------------------------------
# values: literals and simple arithmetic, evaluated without eval

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
DASHES = '-\u2010\u2011\u2012\u2013\u2014\u2212'     # what web pages and word processors make of a hyphen
TOO_LARGE = 2 ** 63             # a number must be below this: it is what torch's whole numbers can hold


def syntax_tree(source, mode):
    """Python source as a tree, mode 'exec' or 'eval'. Raises whatever ast.parse does, but never warns: that would be a second line."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')                 # '\d' has an unknown escape, 1or 2 lacks a blank, ...
        return ast.parse(source, mode=mode)


def small(value):
    """`value`, if it is a real number of a reasonable size; ValueError if not."""
    if type(value) in (int, float) and abs(value) < TOO_LARGE:
        return value
    raise ValueError('a number too large, or none at all')


def evaluate(node):
    """
    The value of a parsed expression that is a literal or simple arithmetic on numbers. ValueError where the arithmetic has no result of
    reasonable size, TypeError for anything else.
    """
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool)):
        return node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search('[\0\ud800-\udfff]', node.value):
        return node.value                               # neither may occur in a path
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return small(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        operand = evaluate(node.operand)
        if type(operand) in (int, float):
            return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = evaluate(node.left), evaluate(node.right)
        if type(left) in (int, float) and type(right) in (int, float):
            if isinstance(node.op, ast.Pow) and (abs(left) > 1e6 or abs(right) > 100):
                raise ValueError('a power too large')
            try:
                value = ARITHMETIC[type(node.op)](left, right)
            except ArithmeticError as error:
                raise ValueError(f'impossible arithmetic: {error}') from None
            return small(value)
    raise TypeError('it is neither a literal nor simple arithmetic')


def refuse(what, default, found, reason=''):
    """
    Ends the script: a value is not of the type of its setting's default, an Assignment.

    what, found     the setting, '--seed' or 'my.py, line 3: seed', and the text of its value
    """
    wanted = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'text in quotes'}[default.kind]
    fail(f'{what} must be {wanted}{" or None" if default.optional else ""}, not `{cut(found)}`' + (f' ({reason})' if reason else ''))


def convert(what, value, default, text):
    """`value`, once written as `text`, in the type of the setting's default, or one clear line. what: see refuse."""
    if value is None and default.optional:
        return None
    if default.kind is float and type(value) is int:
        return float(value)
    if type(value) is not default.kind:
        whole = default.kind is int and type(value) is float and value.is_integer()
        refuse(what, default, text, f'write {int(value)}' if whole else '')
    return value


def parse(what, text, default):
    """A flag's text as a value: text settings take it as it stands, the others as a Python literal. what: see refuse."""
    if default.kind is str:
        return None if text == 'None' and default.optional else text
    if text.lower() in ('true', 'false'):
        return convert(what, text.lower() == 'true', default, text)
    try:
        value = evaluate(syntax_tree(text.strip(), 'eval').body)
    except ValueError as error:
        refuse(what, default, text, error)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        refuse(what, default, text)
    return convert(what, value, default, text)


# ----------------------------------------------------------------------------------------------------------------------
# reading a script's own settings, and config files

class Assignment:
    """One setting as its script declares it: default value, type, whether None is allowed, and the comment behind it."""

    def __init__(self, value, kind, optional, comment, heading):
        self.value, self.kind, self.optional, self.comment, self.heading = value, kind, optional, comment, heading


def nearest_config(path):
    """The config file that was probably meant by a `path` that does not exist: '; did you mean config/rope.py?', or ''."""
    stem = os.path.splitext(os.path.basename(path))[0]
    for folder in ('config', os.path.join(os.path.dirname(os.path.abspath(__file__)), 'config')):
        names = [name.removesuffix('.py') for name in os.listdir(folder)] if os.path.isdir(folder) else []
        for nearest in difflib.get_close_matches(stem, names, n=1):
            return f'; did you mean {os.path.join(folder, nearest)}.py?'
    return ''


def read_source(path, what='the config file'):
    """The text of a Python file (UTF-8), or one clear line."""
    try:
        with open(path, encoding='utf-8-sig') as file:      # -sig: some editors put a byte order mark at the start
            return file.read()
    except FileNotFoundError:
        fail(f'{what} {path or repr(path)} does not exist' + (nearest_config(path) or '; check the path'))
    except IsADirectoryError:
        fail(f'{what} {path} is a directory; name a file in it')
    except UnicodeDecodeError:
        fail(f'{what} {path} is not UTF-8 text; save it as UTF-8, or name another')
    except OSError as error:
        fail(f'{what} {path} cannot be read ({error.strerror}); check the path')


def declared_settings(path):
    """The settings that a script declares above its call of configure(): {name: Assignment}, in the script's order."""
    source = read_source(path, 'the script')
    comments = {}                                       # line number -> (comment, does it stand alone on its line?)
    with open(path, 'rb') as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = (token.string.lstrip('# -').strip(), token.line.lstrip().startswith('#'))
    settings, kinds = {}, {'int': int, 'float': float, 'str': str, 'bool': bool}
    for node in syntax_tree(source, 'exec').body:
        if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call) \
                and getattr(node.value.func, 'id', '') == 'configure' or isinstance(node, ast.If):
            break                                       # the call; it may stand below an `if __name__ == '__main__':`
        if isinstance(node, ast.AnnAssign):
            target, kind, optional = node.target, kinds[node.annotation.id], True
        elif isinstance(node, ast.Assign):
            target, kind, optional = node.targets[0], None, False
        else:
            continue
        value = evaluate(node.value)
        comment = comments.get(node.lineno, ('', False))[0]
        above = comments.get(node.lineno - 1, ('', False))
        settings[target.id] = Assignment(value, kind or type(value), optional, comment, above[0] if above[1] else '')
    return settings


def read_config(path, settings):
    """The assignments of one config file, checked against `settings`: {name: value}."""
    source = read_source(path)
    try:
        body = syntax_tree(source, 'exec').body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = cut(str(getattr(error, 'msg', error) or 'too deeply nested'))
        fail(f'{path}, line {getattr(error, "lineno", None) or 1}: not valid Python ({reason}); write one `name = value` a line')
    values = {}
    for node in body:
        where = f'{path}, line {node.lineno}'
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue                                    # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            fail(f'{where}: a config file holds only assignments such as `n_layer = 4`; remove this')
        name = node.targets[0].id
        known(name, settings, where)
        text = ast.get_source_segment(source, node.value)
        try:
            value = evaluate(node.value)
        except (TypeError, ValueError, RecursionError) as error:
            refuse(f'{where}: {name}', settings[name], text, error)
        values[name] = convert(f'{where}: {name}', value, settings[name], text)
    return values


def known(name, settings, where):
    """Ends the script unless `name` is a setting."""
    if not name:
        fail(f"{where}: a setting's name is missing; flags are written --name=value, see --help")
    if name not in settings:
        nearest = difflib.get_close_matches(name.lower(), settings, n=1)
        fail(f'{where}: there is no setting {cut(name)!r}; ' + (f'did you mean {nearest[0]!r}?' if nearest else 'see --help'))


# ----------------------------------------------------------------------------------------------------------------------

def print_help(path, settings, notation):
    script = os.path.basename(path)
    print((ast.get_docstring(ast.parse(read_source(path, 'the script'))) or script) + '\n')
    print(f'settings ({notation}):')
    for name, default in settings.items():
        if default.heading:
            print(f'\n  {default.heading}')
        print(f'    {f"--{name}={default.value!r}":<36} {default.comment}')


def configure(variables, path, arguments_are='config files', passed_on=None):
    """
    Reads config files and flags from the command line into `variables`, the script's globals().

    path             the script's own file; its settings are the assignments above this call
    arguments_are    'config files', or what else the plain arguments name (such as 'runs'), which are then returned unread; '' for none
    passed_on        settings of another script, from declared_settings(), that are accepted too but not set in `variables`
    Returns settings (all of the script's, by name, in its order), given (those that were named in files or flags, passed_on ones
    included) and arguments (the plain ones).
    """
    sys.excepthook = explain
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')       # what a terminal cannot show is no reason to stop
    settings = declared_settings(path)
    accepted = {**(passed_on or {}), **settings}
    if any(word in ('--help', '-h') for word in sys.argv[1:]):
        print_help(path, settings, '--key=value' + (', or `key = value` in a config file' if arguments_are == 'config files' else ''))
        sys.exit(0)

    arguments, flags = [], {}
    words = sys.argv[1:]
    while words:
        word = words.pop(0)
        if not word.startswith('--'):
            bare = word.lstrip(DASHES)
            name = bare.partition('=')[0]
            if bare != word or not os.path.exists(word) and (name in accepted or '=' in word and name.isidentifier()):
                known(name, accepted, word)
                fail(f'{word} lacks its two plain dashes; write --{bare}')
            if not arguments_are:
                fail(f'{cut(word)!r} belongs to no setting; write --{next(iter(settings))}={word} or the like, see --help')
            arguments.append(word)
            continue
        name, equals, text = word[2:].partition('=')
        if name not in accepted and text.endswith('.py') and arguments_are == 'config files':
            fail(f'{word}: a config file is named without a flag; write {text} alone')
        known(name, accepted, word)
        default = accepted[name]
        if not equals and words and words[0].startswith('='):
            fail(f'{word} {words[0]}: there must be no blanks around =; write --{name}=VALUE')
        if not equals:
            if default.kind is bool and not (words and words[0].lower() in ('true', 'false', 'yes', 'no', 'on', 'off', '1', '0')):
                text = 'True'                           # a bare --overwrite switches it on
            elif not words or words[0].startswith('--'):
                fail(f'{word}: a value is missing; write {word}=VALUE')
            else:
                text = words.pop(0)
        elif not text and default.kind is not str:
            fail(f'{word}: a value is missing; write {word}VALUE, without a blank')
        flags[name] = parse(f'--{name}', text, default)

    given = {}
    if arguments_are == 'config files':
        for file in arguments:
            given.update(read_config(file, accepted))
    given.update(flags)
    values = {name: given.get(name, default.value) for name, default in settings.items()}
    variables.update(values)
    return Configuration(values, given, arguments)
