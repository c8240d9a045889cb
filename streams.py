"""
Text in and text out, in one way for all scripts. In: UTF-8 from regular files, with a byte order mark or
none, whatever the line ends. Out: UTF-8, or what a terminal takes, which is sent no characters that would
control it; and where nobody listens any more, or the disk is full, scripts go on unheard.
"""
import errno
import io
import math
import os
import re
import stat
import sys

CONTROLS = re.compile('[^\n\t -~\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]')     # those of direction, too
CUT = re.compile(r'.*(?:(?<=\S)(?=[ \n])|(?<=[^\W_])(?=[!-/:-@[-`{}~、。，：；！？]))', re.DOTALL)
LONGEST_WORD = 2 ** 22          # characters; of more in one piece tiktoken may take forever, or die


def check_file(path, largest=math.inf):
    """OSError for what is no regular file, as a pipe, which would be waited for, or is too large."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):   # open() refuses directories
        raise OSError(errno.EINVAL, 'it is no regular file')
    if status.st_size > largest:
        raise OSError(errno.EFBIG, f'it has {status.st_size:,} bytes, where {largest:,} are enough')


def open_text(path, largest=math.inf):
    r"""A text file, open to be read, each line end as '\n'; UnicodeDecodeError then if it is not UTF-8."""
    check_file(path, largest)
    return open(path, encoding='utf-8-sig')


def whole_words(pieces):
    """
    The same text in pieces that end where no word and no token of GPT-2's can reach across: before a blank,
    or between a letter or digit and a mark. ValueError where there is no such place for too long.
    """
    rest = ''
    for piece in pieces:
        rest += piece
        if found := CUT.match(rest):
            yield found[0]
            rest = rest[found.end():]
        elif len(rest) > LONGEST_WORD:
            raise ValueError(f'the text has {len(rest):,} characters in a row without a blank, which are too '
                             'many for the gpt2 tokenizer; use --tokenizer=char')
    yield rest


def visible(text):
    """The text with escapes in place of the characters that control a terminal, save newline and tab."""
    return CONTROLS.sub(lambda found: found[0].encode('unicode_escape').decode(), text)


class Output(io.FileIO):
    """stdout or stderr. From the first fault on, such as a closed pipe, what is written goes nowhere."""
    faults = {}                                         # {1 for stdout, 2 for stderr: OSError}

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            self.faults[self.fileno()] = error
            with open(os.devnull, 'wb') as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


class Screen(io.TextIOWrapper):
    """stdout, where it is a terminal."""

    def write(self, text):
        return super().write(visible(text))


def set_up_streams():
    """Makes of stdout and stderr, unless a notebook or a test has replaced them, what is promised above."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:      # closed, as by `>&-`: the next file that is
        os.set_inheritable(lowest, True)                        # opened would be written to in its place
    os.close(lowest)
    for number, name in ((1, 'stdout'), (2, 'stderr')):
        stream = getattr(sys, name)
        if stream is getattr(sys, f'__{name}__'):
            terminal = stream is not None and stream.isatty()
            kind = Screen if terminal and name == 'stdout' else io.TextIOWrapper
            setattr(sys, name, kind(io.BufferedWriter(Output(number, 'w', closefd=False)),
                                    stream.encoding if terminal else 'utf-8', 'backslashreplace',
                                    line_buffering=True))
