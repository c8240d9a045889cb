"""
What is written: statistics, Markdown and csv, and the words in which scripts speak.

Groups are those of runs.group_runs(); a run's `result` is what measure.evaluate() found.
"""
import csv
import io
import math

import numpy as np
from scipy.stats import dunnett

from configurator import fail, training_settings
from runs import SCHEME_SETTINGS

# ------------------------------------------------------------------------------------------------------------
# statistics

def mean_and_error(values):
    """Mean, and its standard error: the standard deviation (n - 1) over sqrt(n); nan for a single value."""
    values = np.asarray(values, dtype=np.float64)
    return values.mean(), values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def intervals(groups, base):
    """
    {label: (difference of a group's mean loss to the base's, and half the width of its interval)}, by
    Dunnett's method (1955): all of these 95% intervals hold together. Runs are independent samples with one
    variance: those of a seed share batches, but their losses hardly rise and fall together. nan where a group
    has a single seed.
    """
    losses = {group.label: [run.result['report_loss'] for run in group.runs.values()] for group in groups}
    others = [label for label in losses if label != base.label]
    half = dict.fromkeys(others, math.nan)
    if others and min(map(len, losses.values())) > 1:
        found = dunnett(*(losses[label] for label in others), control=losses[base.label], rng=0)
        bounds = found.confidence_interval(0.95)
        half = dict(zip(others, (bounds.high - bounds.low) / 2))
    return {label: (np.mean(losses[label]) - np.mean(losses[base.label]), half[label]) for label in others}


def window_spread(group, base):
    """
    The standard deviation over windows of the loss less the base's, both averaged over their common seeds;
    nan if there is none.
    """
    common = sorted(group.runs.keys() & base.runs.keys())
    windows = [[side.runs[seed].result['by_window'] for seed in common] for side in (group, base)]
    if not common or len(windows[0][0]) != len(windows[1][0]) or len(windows[0][0]) < 2:
        return math.nan
    return (np.mean(windows[0], axis=0) - np.mean(windows[1], axis=0)).std(ddof=1)


# ------------------------------------------------------------------------------------------------------------
# words

def counted(number, noun):
    """'1 run', '1,000 runs'."""
    return f'{number:,} {noun}{"s"[:number != 1]}'


def duration(seconds):
    if seconds < 100:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.0f} minutes' if seconds < 6000 else f'{seconds / 3600:.1f} hours'


def named(text, choices, what):
    """The names in a comma-separated list, each of which must be one of the choices."""
    names = [name.strip() for name in text.split(',')]
    for name in names:
        if name not in choices:
            example = ','.join(list(choices)[:2])
            fail(f'{what} {name!r} is not one of {", ".join(choices)}; write --{what}s={example}')
        if names.count(name) > 1:
            fail(f'--{what}s names {name} twice; name each once')
    return names


def last_line(output):
    """The last line of a script's output that says something: its own account of why it ended."""
    lines = output.strip().splitlines()
    return lines[-1].strip().removeprefix('train.py: ') if lines else 'it says nothing'


def table(header, rows):
    """
    A Markdown table, padded so that it also reads well as text. The first column is aligned to the left, the
    others to the right.
    """
    rows = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for first, *others in rows:
        lines.append('| ' + ' | '.join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]) + ' |')
    rule = '|' + '-' * (widths[0] + 2) + '|' + ''.join('-' * (width + 1) + ':|' for width in widths[1:])
    return '\n'.join([lines[0], rule, *lines[1:]])


def flowing(text):
    """A paragraph, wrapped and indented as it may be, in one line, as Markdown has it."""
    return ' '.join(text.split())


def number(value, form='.4f'):
    """A number for a table; what is not known is a dash."""
    return '-' if value is None or math.isnan(value) else format(value, form)


# ------------------------------------------------------------------------------------------------------------
# the comparison

def mean_at(group, length, measure):
    """A group's mean loss at a length, 0: in sliding windows, 1: side by side; or where its table ends."""
    values = [run.result['by_length'][length][measure] for run in group.runs.values()]
    if None in values:
        return f'table ends at {group.first.model_args["block_size"]}'
    return f'{np.mean(values):.4f}'


def losses_of(group, key):
    """A group's mean loss and its standard error, for a table."""
    mean, error = mean_and_error([run.result[key] for run in group.runs.values()])
    return number(mean) + ('' if math.isnan(error) else f' ± {error:.4f}')


def own_settings(groups):
    """
    {label: words}: the settings of a group's own scheme that are not the defaults, and learning rates where
    they are not the same in all groups.
    """
    declared, found = training_settings(), {}
    for group in groups:
        words = []
        for name in SCHEME_SETTINGS[1:]:                # all but the position
            default = declared[name].value
            value = group.first.settings.get(name, default)
            shared = {other.first.settings.get(name, default) for other in groups} == {value}
            if value != default if default is not None else not shared:
                words.append(f'{name} {value:g}' if type(value) is float else f'{name} {value}')
        found[group.label] = ', '.join(words)
    return found


def comparison_rows(groups, base, seconds, lengths, intervals_hold=True):
    """The first table's rows: parameters, losses, difference to the base, step time, loss at `lengths`."""
    differences, rows = intervals(groups, base), []
    for group in groups:
        against_base = ['base', '-']
        if group is not base:
            mean, half = differences[group.label]
            known = intervals_hold and not math.isnan(half)
            interval = f' ({mean - half:+.4f} to {mean + half:+.4f})' if known else ''
            against_base = [number(mean, '+.4f') + interval, number(window_spread(group, base), '.3f')]
        rows.append([group.label, f'{group.own_parameters:,}', losses_of(group, 'report_loss'), *against_base,
                     losses_of(group, 'val_loss'), f'{seconds[group.label] / seconds["none"]:.2f}',
                     *(mean_at(group, length, 0) for length in lengths)])
    return rows


def answers_table(groups):
    """word_order's answers, as parts of table.md; none where nothing was asked."""
    groups = [group for group in groups if group.first.result['answers']]
    if not groups:
        return []
    clauses, rows = list(groups[0].first.result['answers']), []
    for group in groups:
        row = [group.label]
        for n in clauses:
            shares = [run.result['answers'][n] for run in group.runs.values()]
            row.append('table ends' if None in shares else f'{np.mean(shares):.3f}')
        rows.append(row)
    rows.append(['bag of words, at best', *(f'{1 / (2 * n):.3f}' for n in clauses)])
    return ['## word_order: share of right answers by clauses in the sentence',
            table(['scheme', *map(str, clauses)], rows),
            flowing(f"""
                Training sentences have 1 to {len(groups[0].notes["bag_of_words"])} clauses. Up to there:
                validation sentences, whose words no training sentence has together; above: 1,000 new ones
                each. Every question is asked alone, after a line break; the answer is the likeliest token.
                Mean over seeds. A bag of words cannot tell the subject from the object, nor one clause from
                the next: of 2n nouns it hits the right one once in 2n times.
            """)]


def how_trained(groups, forced, kept):
    """What a table says of its runs: seeds, own settings, machine, threads and code."""
    runs = [run for group in groups for run in group.runs.values()]

    def all_of(key):
        return ' and '.join(sorted({str(run.versions.get(key) or 'unknown')[:60] for run in runs}))

    seeds = {group.label: ', '.join(map(str, sorted(group.runs))) for group in groups}
    if len(set(seeds.values())) == 1:
        seeds = {'all': next(iter(seeds.values()))}
    said = '; '.join(f'{label}: {numbers}' for label, numbers in seeds.items())
    own = '; '.join(f'{label}: {words}' for label, words in own_settings(groups).items() if words)
    lines = [f'Seeds of {said}. Trained on {all_of("machine")}, threads: {all_of("threads")}, PyTorch '
             f'{all_of("torch")}, commit {all_of("git_commit")}.'
             + (f' Settings of their own: {own}.' if own else '')]
    if kept:
        lines.append(f'**Kept although the code of their scheme has changed since**: {", ".join(kept)}.')
    if forced:
        lines.append(f'**Not trained alike, so differences have no interval**: {"; ".join(forced)}.')
    return lines


def comparison(groups, base, block_size, sweep, stride, seconds, forced=(), kept=()):
    """
    table.md as text: the comparison, the length sweep, word_order's answers, and how each was measured.
    forced, kept: see check_comparable(), and the folders of runs that other code has trained.
    """
    lengths, _, count = sweep
    settings = base.first.settings
    shown = [multiple * block_size for multiple in (1, 2, 4, 8) if multiple * block_size in lengths]
    header = ['scheme', 'own parameters', 'loss', f'difference to {base.label}', 'over windows', 'of all',
              'step time', *(f'at {length // block_size}x = {length}' for length in shown)]
    rows = comparison_rows(groups, base, seconds, shown, intervals_hold=not forced)
    what = 'the validation text'
    if settings['dataset'] == 'shakespeare_char':
        what = 'Macbeth and The Tempest, on which no setting was chosen,'
    else:                                               # all of it is judge: one figure
        header, rows = header[:5] + header[6:], [row[:5] + row[6:] for row in rows]
    names = ('n_layer', 'n_head', 'n_embd', 'block_size', 'batch_size', 'max_iters', 'optimizer')
    sizes = ', '.join(f'{name} {settings[name]}' for name in names)
    parts = [
        f'# Position encodings on {settings["dataset"]}',
        f'{sizes}. Losses in nats per token; lower is better.',
        *how_trained(groups, forced, kept),
        table(header, rows),
        flowing(f"""
            Loss: over {what} in windows of {block_size}, the weights after the last step, in float32; mean
            over seeds ± its standard error; of all: over the whole validation text. Difference to
            {base.label}: of the means; in brackets intervals that all hold together, at 95% (Dunnett 1955).
            Where they overlap, nobody is ahead. Over windows: the standard deviation of the difference from
            one window of {block_size} to the next. Step time: a training step in units of one of the scheme
            none, the fastest of many, the schemes taking turns in one process; the only column that two runs
            of one command do not share. At 1x, 2x, ..: the loss in windows of so many tokens that slide by
            {stride}, over {count:,} tokens, the same ones at every length.
        """),
        '## Loss by the length that is read']
    texts = [
        f"""
            Sliding windows, each {stride} tokens after the one before: every token is predicted from more
            than length - {stride} tokens, and the same {count:,} tokens are scored at every length, so a row
            tells what a longer window gains. Mean over seeds.
        """,
        """
            Windows side by side, as a text is read that begins nowhere else. A window's first tokens have
            little context, and short windows have more of them: what a longer window gains here is mostly
            that.
        """]
    for measure, text in enumerate(texts):
        rows = [[group.label, *(mean_at(group, length, measure) for length in lengths)] for group in groups]
        parts += [flowing(text), table(['scheme', *map(str, lengths)], rows)]
    return '\n\n'.join(parts + answers_table(groups)) + '\n'


def results_csv(groups, seconds):
    """results.csv as text: a row for each run, with everything that the table averages."""
    lengths, clauses = (list(groups[0].first.result[key]) for key in ('by_length', 'answers'))
    measures, own = ('_sliding', ''), own_settings(groups)
    rows = [['run', 'scheme', 'seed', 'parameters', 'own_parameters', 'own_settings', 'steps', 'tokens',
             'seconds', 'loss', 'val_loss', 'step_time_to_none',
             *(f'loss_at_{length}{measure}' for measure in measures for length in lengths),
             *(f'accuracy_{n}_clauses' for n in clauses)]]
    for group in groups:
        step_time = round(seconds[group.label] / seconds['none'], 3)
        for seed, run in sorted(group.runs.items()):
            result, last = run.result, run.log[-1]
            rows.append([run.folder, group.label, seed, group.parameters, group.own_parameters,
                         own[group.label], last.iteration, last.tokens, last.seconds, result['report_loss'],
                         result['val_loss'], step_time,
                         *(result['by_length'][length][i] for i in range(2) for length in lengths),
                         *(result['answers'].get(n) for n in clauses)])
    return csv_text(rows)


def csv_text(rows):
    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(rows)
    return text.getvalue()


# ------------------------------------------------------------------------------------------------------------
# RoPE beyond its trained length

def scaling_report(rows, L, lengths, count, stride, zero_shot):
    """
    scaling.md as text. rows: (name, runs, for each length and run what losses_at_length() found); with the
    name of a scaling the runs `zero_shot`, trained from scratch, with others what was trained on from them.
    """
    how = f"""
        Loss in nats per token over {count:,} tokens of the validation text, the same ones in each column;
        mean over so many seeds as the brackets say. """
    if zero_shot:
        how += """A scaling by itself is switched on at evaluation, with factor = length / L and original
            length L. ntk, dynamic: read in one pass, dynamic with factor 1 is ntk with factor length / L,
            number for number. Rows with steps: trained on from such runs, scored as they are."""
    dataset = rows[0][1][0].settings['dataset']
    parts = [f'# RoPE beyond its trained length, L = {L}, on {dataset}', flowing(how)]
    titles = [f'Sliding windows, stride {stride}', 'Windows side by side']
    header = ['scaling (seeds)', *(f'{length // L}L = {length}' for length in lengths)]
    for measure, title in enumerate(titles):
        cells = [[f'{name} ({len(runs)})', *(f'{np.mean([loss[measure] for loss in found]):.4f}'
                                             for found in losses)] for name, runs, losses in rows]
        parts += [f'## {title}', table(header, cells)]
    return '\n\n'.join(parts) + '\n'


def scaling_csv(rows, L, lengths):
    """scaling.csv as text: a row for each scaling, run and length."""
    return csv_text([['scaling', 'run', 'seed', 'trained_length', 'length', 'loss_sliding', 'loss'], *(
        [name, run.folder, run.settings['seed'], L, length, *loss] for name, runs, losses in rows
        for length, found in zip(lengths, losses) for run, loss in zip(runs, found))])
