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
import sys
import tokenize
from collections import namedtuple

Configuration = namedtuple('Configuration', 'settings given arguments')     # what configure() returns: see there


def fail(message):
    """Ends the script on a user's mistake: one line on stderr that names the fault and the remedy, exit status 2."""
    print(f'{os.path.basename(sys.argv[0])}: {message}', file=sys.stderr)
    sys.exit(2)


# ----------------------------------------------------------------------------------------------------------------------
# values: literals and simple arithmetic, evaluated without eval

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}


def evaluate(node):
    """The value of a parsed expression that is a literal or simple arithmetic on numbers; ValueError for anything else."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (bool, int, float, str))):
        return node.value
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
            except (ArithmeticError, TypeError):
                raise ValueError('impossible arithmetic') from None
            if type(value) in (int, float) and abs(value) < 1e300:
                return value
            raise ValueError('a number too large')
    raise ValueError('not a literal or simple arithmetic')


def convert(name, value, default, where):
    """`value` in the type of the setting's default (an Assignment), or one clear line."""
    kind = default.kind
    if value is None and default.optional:
        return None
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1e300 else math.inf
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        wanted = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'text'}[kind]
        fail(f'{where}: {name} must be {wanted}{" or None" if default.optional else ""}, not {value!r}')
    return value


def parse(name, text, default, where):
    """A flag's text as a value: text settings take it as it stands, the others as a Python literal."""
    if default.kind is str:
        value = None if text == 'None' and default.optional else text
    elif text.lower() in ('true', 'false'):
        value = text.lower() == 'true'
    else:
        try:
            value = evaluate(ast.parse(text.strip(), mode='eval').body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            value = text
    return convert(name, value, default, where)


# ----------------------------------------------------------------------------------------------------------------------
# reading a script's own settings, and config files

class Assignment:
    """One setting as its script declares it: default value, type, whether None is allowed, and the comment behind it."""

    def __init__(self, value, kind, optional, comment, heading):
        self.value, self.kind, self.optional, self.comment, self.heading = value, kind, optional, comment, heading


def read_source(path, what='the config file'):
    """The text of a Python file (UTF-8), or one clear line."""
    try:
        with open(path, encoding='utf-8') as file:
            return file.read()
    except FileNotFoundError:
        nearest = difflib.get_close_matches(path, [os.path.join('config', name) for name in sorted(os.listdir('config'))]
                                            if os.path.isdir('config') else [], n=1)
        fail(f'{what} {path} does not exist' + (f'; did you mean {nearest[0]}?' if nearest else '; check the path'))
    except IsADirectoryError:
        fail(f'{what} {path} is a directory; name a file in it')
    except (OSError, UnicodeDecodeError) as error:
        fail(f'{what} {path} cannot be read as UTF-8 text ({error.__class__.__name__}); check the file')


def declared_settings(path):
    """The settings that a script declares above its call of configure(): {name: Assignment}, in the script's order."""
    source = read_source(path, 'the script')
    comments = {}                                       # line number -> (comment, does it stand alone on its line?)
    with open(path, 'rb') as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = (token.string.lstrip('# -').strip(), token.line.lstrip().startswith('#'))
    settings, kinds = {}, {'int': int, 'float': float, 'str': str, 'bool': bool}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call) \
                and getattr(node.value.func, 'id', '') == 'configure':
            break
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
    try:
        body = ast.parse(read_source(path)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        fail(f'{path}, line {getattr(error, "lineno", None) or 1}: not valid Python; write one `name = value` a line')
    values = {}
    for node in body:
        where = f'{path}, line {node.lineno}'
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue                                    # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            fail(f'{where}: a config file holds only assignments such as `n_layer = 4`; remove this')
        name = node.targets[0].id
        known(name, settings, where)
        try:
            value = evaluate(node.value)
        except (ValueError, RecursionError) as error:
            fail(f'{where}: {name} must be a literal or simple arithmetic such as 4 * 256 ({error})')
        values[name] = convert(name, value, settings[name], where)
    return values


def known(name, settings, where):
    """Ends the script unless `name` is a setting."""
    if name not in settings:
        nearest = difflib.get_close_matches(name, settings, n=1)
        fail(f'{where}: there is no setting {name!r}; ' + (f'did you mean {nearest[0]!r}?' if nearest else 'see --help'))


# ----------------------------------------------------------------------------------------------------------------------

def print_help(path, settings):
    script = os.path.basename(path)
    print((ast.get_docstring(ast.parse(read_source(path, 'the script'))) or script) + '\n')
    print('settings (--key=value, or `key = value` in a config file):')
    for name, default in settings.items():
        if default.heading:
            print(f'\n  {default.heading}')
        print(f'    {f"--{name}={default.value!r}":<36} {default.comment}')


def configure(variables, path, arguments_are='config files', passed_on=None):
    """
    Reads config files and flags from the command line into `variables`, the script's globals().

    path             the script's own file; its settings are the assignments above this call
    arguments_are    'config files', or what else the plain arguments name (such as 'runs'), which are then returned unread
    passed_on        settings of another script, from declared_settings(), that are accepted too but not set in `variables`
    Returns settings (all of the script's, by name, in its order), given (those that were named in files or flags, passed_on ones
    included) and arguments (the plain ones).
    """
    settings = declared_settings(path)
    accepted = {**(passed_on or {}), **settings}
    if any(word in ('--help', '-h') for word in sys.argv[1:]):
        print_help(path, settings)
        sys.exit(0)

    arguments, flags = [], {}
    words = sys.argv[1:]
    while words:
        word = words.pop(0)
        if not word.startswith('--'):
            name = word.lstrip('-').split('=')[0]
            if name in accepted and (word.startswith('-') or '=' in word):
                fail(f'{word!r} lacks its two dashes; write --{word.lstrip("-")}')
            if word.startswith('-'):
                fail(f'{word!r} is no flag; flags are written --key=value, see --help')
            arguments.append(word)
            continue
        name, equals, text = word[2:].partition('=')
        known(name, accepted, word)
        default = accepted[name]
        if not equals:
            if default.kind is bool and not (words and words[0].lower() in ('true', 'false')):
                text = 'True'                           # a bare --overwrite switches it on
            elif not words or words[0].startswith('--'):
                fail(f'{word}: a value is missing; write {word}=VALUE')
            else:
                text = words.pop(0)
        flags[name] = parse(name, text, default, f'--{name}')

    given = {}
    if arguments_are == 'config files':
        for file in arguments:
            given.update(read_config(file, accepted))
    given.update(flags)
    values = {name: given.get(name, default.value) for name, default in settings.items()}
    variables.update(values)
    return Configuration(values, given, arguments)
