"""
What is written: statistics, Markdown and csv, and the words in which scripts speak. Nothing here needs
PyTorch.

Groups are those of runs.group_runs(); a run's `result` is what measure.evaluate() found.
"""
import csv
import io
import math

import numpy as np

from configurator import fail

# ------------------------------------------------------------------------------------------------------------
# statistics

# The 0.975 quantile of Student's t distribution with 1, 2, .. 20 degrees of freedom
# (NIST/SEMATECH e-Handbook, section 1.3.6.7.2)
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
               2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


def mean_and_error(values):
    """Mean, and its standard error: the standard deviation (n - 1) over sqrt(n); nan for a single value."""
    values = np.asarray(values, dtype=np.float64)
    return values.mean(), values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def paired_difference(losses, base_losses):
    """
    Both {seed: loss}. The mean over the seeds that both have of loss - base loss, and half the width of its
    95% interval: t times the standard error, with n - 1 degrees of freedom (beyond 20 the t of 20, a shade
    too wide); nan for a single seed, (nan, nan) for none.
    """
    common = sorted(losses.keys() & base_losses.keys())
    if not common:
        return math.nan, math.nan
    mean, error = mean_and_error([losses[seed] - base_losses[seed] for seed in common])
    return mean, error * T_QUANTILES[min(len(common) - 1, len(T_QUANTILES)) - 1]


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

def mean_at(group, length, measure=0):
    """A group's mean loss at a length, for a table; or where its table of positions ends."""
    values = [run.result['by_length'][length][measure] for run in group.runs.values()]
    if None in values:
        return f'table ends at {group.first.model_args["block_size"]}'
    return f'{np.mean(values):.4f}'


def comparison_rows(groups, base, seconds, lengths):
    """The first table's rows: parameters, loss, difference to the base, step time, loss at `lengths`."""
    base_losses, rows = {seed: run.result['val_loss'] for seed, run in base.runs.items()}, []
    for group in groups:
        losses = {seed: run.result['val_loss'] for seed, run in group.runs.items()}
        mean, error = mean_and_error(list(losses.values()))
        loss = number(mean) + ('' if math.isnan(error) else f' ± {error:.4f}')
        mean, half = paired_difference(losses, base_losses)
        interval = '' if math.isnan(half) else f' ({mean - half:+.4f} to {mean + half:+.4f})'
        against_base = ['base', '-'] if group is base else \
            [number(mean, '+.4f') + interval, number(window_spread(group, base), '.3f')]
        step_time = f'{seconds[group.label] / seconds["none"]:.2f}'
        rows.append([group.label, f'{group.own_parameters:,}', loss, *against_base, step_time,
                     *(mean_at(group, length) for length in lengths)])
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


def comparison(groups, base, block_size, sweep, stride, seconds):
    """table.md as text: the comparison, the length sweep, word_order's answers, and how each was measured."""
    lengths, _, count = sweep
    settings = base.first.settings
    shown = [multiple * block_size for multiple in (1, 2, 4, 8) if multiple * block_size in lengths]
    header = ['scheme', 'own parameters', 'validation loss', f'difference to {base.label}', 'over windows',
              'step time', *(f'at {length // block_size}x = {length}' for length in shown)]
    names = ('n_layer', 'n_head', 'n_embd', 'block_size', 'batch_size', 'max_iters', 'optimizer')
    sizes = ', '.join(f'{name} {settings[name]}' for name in names)
    n_seeds = ' or '.join(counted(n, 'seed') for n in sorted({len(group.runs) for group in groups}))
    parts = [
        f'# Position encodings on {settings["dataset"]}',
        f'{sizes}; {n_seeds} each. Losses in nats per token; lower is better.',
        table(header, comparison_rows(groups, base, seconds, shown)),
        flowing(f"""
            Validation loss: the whole validation text in windows of {block_size}, the weights after the last
            step, in float32; mean over seeds ± its standard error. Difference to {base.label}: runs with one
            seed share batches, initial weights and windows, so they are subtracted seed by seed; mean, and in
            brackets the 95% t interval over seeds. Over windows: the standard deviation of that difference
            from one window of {block_size} to the next. Step time: a training step in units of one of the
            scheme none, the fastest of many, the schemes taking turns in one process; the only column that
            two runs of one command do not share. At 1x, 2x, ..: the loss in windows of so many tokens, over
            {count:,} tokens of the validation text, the same ones at every length.
        """),
        '## Loss by the length that is read']
    texts = [
        f"""
            The same {count:,} tokens at every length, in windows side by side; mean over seeds. A window's
            first tokens have little context, and short windows have more of them: so much of what a longer
            window gains is gained by fewer early tokens.
        """,
        """
            The last quarter of each window alone: every token has at least three quarters of the length as
            context. It is another quarter of the text at each length: hold the schemes of one column beside
            one another, not the columns of one scheme.
        """,
        f"""
            Sliding windows, each {stride} tokens after the one before: every token is predicted from more
            than length - {stride} tokens, and the same tokens are scored at every length. Windows up to that
            length stand side by side.
        """]
    for measure, text in enumerate(texts[:2 if stride is None else 3]):
        rows = [[group.label, *(mean_at(group, length, measure) for length in lengths)] for group in groups]
        parts += [flowing(text), table(['scheme', *map(str, lengths)], rows)]
    return '\n\n'.join(parts + answers_table(groups)) + '\n'


def results_csv(groups, seconds):
    """results.csv as text: a row for each run, with everything that the table averages."""
    lengths, clauses = (list(groups[0].first.result[key]) for key in ('by_length', 'answers'))
    measures = ('', '_last_quarter', '_sliding')
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(['run', 'scheme', 'seed', 'parameters', 'own_parameters', 'steps', 'tokens', 'seconds',
                     'val_loss', 'step_time_to_none',
                     *(f'loss_at_{length}{measure}' for measure in measures for length in lengths),
                     *(f'accuracy_{n}_clauses' for n in clauses)])
    for group in groups:
        step_time = round(seconds[group.label] / seconds['none'], 3)
        for seed, run in sorted(group.runs.items()):
            result, last = run.result, run.log[-1]
            writer.writerow([run.folder, group.label, seed, group.parameters, group.own_parameters,
                             last.iteration, last.tokens, last.seconds, result['val_loss'], step_time,
                             *(result['by_length'][length][i] for i in range(3) for length in lengths),
                             *(result['answers'].get(n) for n in clauses)])
    return text.getvalue()


# ------------------------------------------------------------------------------------------------------------
# RoPE beyond its trained length

def scaling_report(rows, L, lengths, count, stride, zero_shot, trained_on):
    """
    scaling.md as text. rows: (name, for each length what losses_at_length() found of each run), by the name
    of a scaling for the runs `zero_shot`, trained from scratch, and one for each run of `trained_on`.
    """
    how = (f'Loss in nats per token over {count:,} tokens of the validation text, '
           'the same ones in each column.')
    if zero_shot:
        folders = ', '.join(run.folder for run in zero_shot)
        how += f"""
            Zero-shot, mean over {counted(len(zero_shot), "run")} ({folders}): the scaling is switched on at
            evaluation, with factor = length / L and original length L."""
    if trained_on:
        how += ' Rows that name a folder: runs that were trained on, scored as they are.'
    dataset = (zero_shot + trained_on)[0].settings['dataset']
    parts = [f'# RoPE beyond its trained length, L = {L}, on {dataset}', flowing(how)]
    titles = ['All tokens, windows side by side', 'The last quarter of each window',
              f'Sliding windows, stride {stride}']
    header = ['scaling', *(f'{length // L}L = {length}' for length in lengths)]
    for measure, title in enumerate(titles[:2 if stride is None else 3]):
        cells = [[name, *(f'{np.mean([run[measure] for run in runs]):.4f}' for runs in losses)]
                 for name, losses in rows]
        parts += [f'## {title}', table(header, cells)]
    if zero_shot and 'dynamic' in [name for name, _ in rows]:
        parts.append(flowing("""
            A window is read in one pass, so dynamic takes the base for the whole window: base (factor n / L -
            (factor - 1))^(d / (d - 2)) at n tokens. With factor 1 instead that is the row ntk exactly.
        """))
    return '\n\n'.join(parts) + '\n'
