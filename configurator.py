"""
Settings, in nanoGPT's manner: plain assignments at a script's top, each with a comment behind it, such as

    n_layer: count = None   # number of blocks; None fits the machine

and below them `configure(globals(), __file__)`, which reads config files in turn, then flags (`--key=value`
or `--key value`); later ones win. A setting keeps the type of its default; an annotation says what that does
not: the type behind None, a limit (`count`, `share`), or that None will do (`count | None`). Nothing here is
executed, unlike nanoGPT's: a config file holds literals and simple arithmetic, and the rest is refused.
"""
import ast
import contextlib
import difflib
import functools
import glob
import io
import keyword
import math
import operator
import os
import re
import sys
import time
import tokenize
import warnings
from collections import namedtuple

from streams import open_text, set_up_streams, visible

count = int                     # annotates a whole number of at least 1
share = float                   # annotates a number of at least 0 and below 1
TOO_LARGE = 2 ** 63             # what no number may reach: torch's whole numbers end below it
KINDS = {                       # by annotation or type: type, what to write, least, what is too much
    'int': (int, 'a whole number of at least 0', 0, TOO_LARGE),
    'count': (int, 'a whole number of at least 1', 1, TOO_LARGE),
    'float': (float, 'a number of at least 0', 0, TOO_LARGE),
    'share': (float, 'a number of at least 0 and below 1', 0, 1),
    'str': (str, 'text in quotes', '', None),
    'bool': (bool, 'True or False', False, None)}

# A setting as declared: default, name in KINDS, whether None will do, the comments behind it and above it
Assignment = namedtuple('Assignment', 'value kind optional comment heading')
Configuration = namedtuple('Configuration', 'settings given arguments')     # what configure() returns
HERE = os.path.dirname(os.path.abspath(__file__))
# nanoGPT's settings that have no counterpart, so that its config files and commands go on working
LEFT_OUT = {'eval_iters': 'an evaluation reads eval_windows windows, always the same ones',
            'always_save_checkpoint': 'the best state is kept, in ckpt.pt, and the last one, in last.pt'}


def fail(message):
    """Ends the script on a user's mistake: one line on stderr that names fault and remedy, exit status 2."""
    if os.environ.get('LOCAL_RANK', '0') != '0':        # under torchrun the first process says it:
        time.sleep(3)                                   # when it has ended, torchrun ends the others
    line = visible(' '.join(str(message)[:10 ** 6].splitlines()))       # it may quote a stranger's file
    line = line if len(line) < 900 else f'{line[:600]} ... {line[-250:]}'
    print(f'{os.path.basename(sys.argv[0])}: {line}', file=sys.stderr)
    sys.exit(2)


def out_of_memory(error):
    """Whether an error says that memory is short: as Python does, the system, or PyTorch in its many ways."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in (
        'allocate memory', 'not enough memory', 'out of memory', 'bad_alloc', 'alloc_failed'))


def explain(kind, error, traceback):
    """In place of a traceback, as sys.excepthook: two faults that may come at any moment get one line."""
    if kind is KeyboardInterrupt:
        return print('stopped', file=sys.stderr)
    if out_of_memory(error):
        fail('there is not enough memory for these sizes; choose a smaller batch_size, window or model')
    sys.__excepthook__(kind, error, traceback)


def cut(text):
    """The text for an error message, short."""
    return text if len(text) <= 60 else text[:60] + '...'


# ------------------------------------------------------------------------------------------------------------
# values: literals and simple arithmetic, evaluated without eval

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
              ast.UAdd: operator.pos, ast.USub: operator.neg}
NO_VALUE = object()             # stands for what evaluate() does not evaluate
LARGEST_CONFIG = 2 ** 16        # bytes
DEEPEST = 100                   # operators, brackets and keywords in an assignment: nothing else nests


def syntax_tree(source, mode):
    """A stranger's Python source as a tree, mode 'exec' or 'eval'. SyntaxError or ValueError if none."""
    depth = 0                   # at most: counted first, since parsing gives up at no fixed depth
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')                 # '\d' has an unknown escape, 1or 2 lacks a blank, ...
        with contextlib.suppress(tokenize.TokenError, SyntaxError):     # ast.parse will say what is wrong
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                nests = token.type == tokenize.OP and token.string != '=' or keyword.iskeyword(token.string)
                depth = 0 if token.type == tokenize.NEWLINE else depth + nests
                if depth > DEEPEST:
                    raise ValueError('too deeply nested')
        return ast.parse(source, mode=mode)


def evaluate(node):
    """
    The value of a parsed expression that is a literal or simple arithmetic on numbers. ValueError where the
    arithmetic has no real result of reasonable size, TypeError for anything else.
    """
    value = node.value if isinstance(node, ast.Constant) else NO_VALUE
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and not re.search('[\0\ud800-\udfff]', value):       # which no path may hold
        return value
    if isinstance(node, (ast.UnaryOp, ast.BinOp)) and type(node.op) in ARITHMETIC:
        numbers = [evaluate(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        if all(type(number) in (int, float) for number in numbers):
            if isinstance(node.op, ast.Pow) and (abs(numbers[0]) > 1e6 or abs(numbers[1]) > 100):
                raise ValueError('a power too large')
            try:
                value = ARITHMETIC[type(node.op)](*numbers)
            except ArithmeticError as error:
                raise ValueError(f'impossible arithmetic: {error}') from None
    if not isinstance(value, (int, float, complex)):
        raise TypeError('neither a literal nor simple arithmetic')
    if isinstance(value, complex) or not abs(value) < TOO_LARGE:
        raise ValueError('a number too large, or none at all')
    return value


def suits(value, setting):
    """Whether a value is of the setting's type, and within its limits."""
    kind, _, least, too_much = KINDS[setting.kind]
    return setting.optional if value is None else (
        type(value) is kind and least <= value and (too_much is None or value < too_much))


def convert(what, text, tree, setting):
    """The value of an expression, which tree() makes, in the type of its setting; or one line, which quotes
    what is set, '--seed' or 'my.py, line 3: seed', and the value as written."""
    kind, wanted = KINDS[setting.kind][:2]
    try:
        value, reason = evaluate(tree()), ''
        if kind is float and type(value) is int:
            value = float(value)
        if suits(value, setting):
            return value
        if kind is int and type(value) is float and value.is_integer():
            reason = f' (write {int(value)})'
    except (SyntaxError, TypeError, ValueError) as error:
        reason = f' ({cut(str(getattr(error, "msg", error)))})'
    fail(f'{what} must be {wanted}{", or None" if setting.optional else ""}, not `{cut(text)}`{reason}')


def parse(name, text, setting):
    """A flag's text as a value: text settings take it as it stands, the others as a Python literal."""
    if setting.kind == 'str':
        return None if text == 'None' and setting.optional else text
    literal = text.strip().capitalize() if text.lower() in ('true', 'false') else text.strip()
    return convert(f'--{name}', text, lambda: syntax_tree(literal, 'eval').body, setting)


# ------------------------------------------------------------------------------------------------------------
# what a script declares, and config files

def read_source(path, what='the config file', largest=math.inf):
    """The text of a Python file (UTF-8), or one line."""
    try:
        with open_text(path, largest) as file:
            return file.read()
    except UnicodeDecodeError:
        fail(f'{what} {path} is not UTF-8 text; save it as UTF-8, or name another')
    except OSError as error:
        there = {os.path.basename(path): path for folder in (os.path.join(HERE, 'config'), 'config')
                 for path in glob.glob(os.path.join(glob.escape(folder), '*.py'))}
        nearest = difflib.get_close_matches(os.path.basename(path).removesuffix('.py') + '.py', there, n=1)
        guess = nearest and path and isinstance(error, FileNotFoundError)
        remedy = f'did you mean {there[nearest[0]]}?' if guess else 'check the path'
        fail(f'{what} {path or repr(path)} cannot be read ({error.strerror}); {remedy}')


def assignments(body, source, heading=''):
    """The assignments in a part of a source's tree: {name: Assignment}. heading: stands above the first."""
    found, lines = {}, source.splitlines()
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            name, _, annotation = ast.unparse(node).partition(' = ')[0].partition(': ')
            value = evaluate(node.value)
            kind = annotation.removesuffix(' | None') or type(value).__name__
            optional = value is None or annotation.endswith(' | None')
            above, comment = lines[node.lineno - 2], lines[node.end_lineno - 1].partition(' # ')[2].strip()
            heading = above.strip('# -') if above.startswith('# ') else heading
            found[name], heading = Assignment(value, kind, optional, comment, heading), ''
    return found


def declared_settings(path):
    """The settings that a script declares above its call of configure(), in its order: {name: Assignment}."""
    source = read_source(path, 'the script')
    body = ast.parse(source).body
    call = next(number for number, node in enumerate(body) if ' configure(' in f' {ast.unparse(node)}')
    return assignments(body[:call], source)


def scheme_options():
    """The options that the schemes' classes declare, read as text: PyTorch takes long to import."""
    options = {}
    for file in ('model.py', 'more_schemes.py'):
        source = read_source(os.path.join(HERE, file)) if os.path.exists(os.path.join(HERE, file)) else ''
        for scheme in ast.parse(source).body:
            if isinstance(scheme, ast.ClassDef) and scheme.name != 'GPTConfig':
                declared = [node for node in scheme.body if isinstance(node, ast.AnnAssign)]
                options.update(assignments(declared, source, f'options of {scheme.name}, in {file}'))
    return options


@functools.cache
def training_settings():
    """train.py's settings, the schemes' options among them: {name: Assignment}."""
    return {**declared_settings(os.path.join(HERE, 'train.py')), **scheme_options()}


def read_config(path, settings):
    """The assignments of one config file, checked against `settings`: {name: value}."""
    source, values = read_source(path, largest=LARGEST_CONFIG), {}
    lines = [line.encode() for line in source.split('\n')]      # ast counts columns in bytes
    try:
        body = syntax_tree(source, 'exec').body
    except (SyntaxError, ValueError) as error:
        reason, line = cut(str(getattr(error, 'msg', error))), getattr(error, 'lineno', None) or 1
        fail(f'{path}, line {line}: not valid Python ({reason}); write one `name = value` a line')
    for node in body:
        where = f'{path}, line {node.lineno}'
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, 'value', None), str):
            continue                                    # a docstring
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [type(target) for target in targets] != [ast.Name]:
            fail(f'{where}: a config file holds only assignments such as `n_layer = 4`; remove this')
        end = node.value.end_col_offset if node.value.end_lineno == node.value.lineno else None
        name, text = targets[0].id, lines[node.value.lineno - 1][node.value.col_offset:end].decode()
        if left_out(name, settings, where):
            continue
        need_known(name, settings, where)
        values[name] = convert(f'{where}: {name}', text, lambda: node.value, settings[name])
    return values


# ------------------------------------------------------------------------------------------------------------
# the command line

DASHES = '-\u2010\u2011\u2012\u2013\u2014\u2212'     # what web pages and word processors make of a hyphen


def need_known(name, settings, where):
    """Ends the script unless `name` is a setting."""
    if name not in settings:
        nearest = difflib.get_close_matches(name.lower(), settings, n=1)
        remedy = f'did you mean {nearest[0]!r}?' if nearest else 'flags are written --name=value, see --help'
        fail(f'{where}: there is no setting {cut(name)!r}; {remedy}')


def left_out(name, settings, where):
    """Says so of a setting of nanoGPT's that has no counterpart here, and whether it is one."""
    found = name in LEFT_OUT and 'eval_windows' in settings and name not in settings
    if found:
        print(f'{where}: {name} is left out: {LEFT_OUT[name]}', file=sys.stderr)
    return found


def configure(variables, path, arguments_are='config files', passed_on=None, more=None):
    """
    Reads config files and flags from the command line into `variables`, the script's globals().

    path             the script's own file; its settings are the assignments above this call
    arguments_are    what plain arguments name: config files, or others, such as runs, left alone; '': none
    passed_on        settings of another script, {name: Assignment}, accepted too but not set in `variables`
    more             further settings of this one, {name: Assignment}: scheme_options()

    Returns all settings; given, those named in files or flags, passed_on ones too; and the plain arguments.
    """
    sys.excepthook = explain
    set_up_streams()
    settings = {**declared_settings(path), **(more or {})}
    accepted = {**(passed_on or {}), **settings}
    arguments, flags, words = [], {}, sys.argv[1:]
    if '--help' in words or '-h' in words:
        print(ast.get_docstring(ast.parse(read_source(path))) + '\n\nsettings:')
        for name, setting in settings.items():
            if setting.heading:
                print(f'\n  {setting.heading}')
            print(f'    {f"--{name}={setting.value!r}":<36} {setting.comment}')
        sys.exit(0)

    while words:
        word = words.pop(0)
        bare = word.lstrip(DASHES)
        name, equals, text = bare.partition('=')
        if not word.startswith('--'):
            is_flag = not os.path.exists(word) and (name in accepted or equals and name.isidentifier())
            if bare != word or is_flag:
                need_known(name, accepted, word)
                fail(f'{word} lacks its two plain dashes; write --{bare}')
            if not arguments_are:
                fail(f'{cut(word)!r} belongs to no setting; write --{next(iter(settings))}={word}, or so')
            arguments.append(word)
            continue
        if left_out(name, accepted, word):
            if not equals and words and not words[0].startswith('--'):
                words.pop(0)
            continue
        need_known(name, accepted, word)
        kind, follows = accepted[name].kind, words[0] if words else '--'
        if not equals and kind == 'bool' and follows.lower() not in ('true', 'false', 'yes', 'no', '1', '0'):
            text = 'True'                               # a bare --overwrite switches it on
        elif not equals and not follows.startswith('--'):
            text = words.pop(0)
        elif not text and not (equals and kind == 'str'):
            fail(f'{word}: a value is missing; write --{name}=VALUE, without blanks')
        flags[name] = parse(name, text, accepted[name])

    given = {}
    for file in arguments if arguments_are == 'config files' else ():
        given.update(read_config(file, accepted))
    given.update(flags)
    values = {name: given.get(name, setting.value) for name, setting in settings.items()}
    variables.update(values)
    return Configuration(values, given, arguments)
