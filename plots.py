"""
Pictures: every one of this project's in one style. matplotlib is imported when the first is drawn, since
scripts do without it.

Groups are those of runs.group_runs(); a run's `result` is what measure.evaluate() found.
"""
import io
import math

import numpy as np

from dataset import write_whole

# How each scheme is drawn, in every picture of this project. The colours are Okabe and Ito's (2008), which
# the colour-blind can tell apart; the dashes and marks tell the lines apart in black and white.
STYLES = {
    'learned': dict(color='#000000', linestyle='-', marker='o'),
    'sinusoidal': dict(color='#56B4E9', linestyle=(0, (5, 2)), marker='s'),
    'shaw': dict(color='#CC79A7', linestyle=(0, (6, 2, 1, 2)), marker='D'),
    'rope': dict(color='#D55E00', linestyle='-', marker='^'),
    'alibi': dict(color='#0072B2', linestyle=(0, (3, 1)), marker='v'),
    'none': dict(color='#888888', linestyle=(0, (1, 1)), marker='x'),
    't5': dict(color='#009E73', linestyle=(0, (8, 2)), marker='P'),
    'tupe': dict(color='#E69F00', linestyle=(0, (6, 2, 1, 2, 1, 2)), marker='*'),
}
OTHER_STYLE = dict(color='#6A3D9A', linestyle=(0, (2, 2)), marker='p')      # of schemes that readers add
NATS = 'loss (nats per token)'


# ------------------------------------------------------------------------------------------------------------
# what all pictures are made of

def new_figure(panels):
    """A figure with so many panels side by side, and room for labels right of each."""
    from matplotlib.figure import Figure                # without pyplot, which would open a window
    figure = Figure(figsize=(5.2 * panels, 4))
    axes = figure.subplots(1, panels, squeeze=False)[0]
    figure.subplots_adjust(left=0.75 / (5.2 * panels), right=1 - 1.05 / (5.2 * panels), bottom=0.13, top=0.91,
                           wspace=0.5)
    return figure, axes


def write_figure(figure, path):
    picture = io.BytesIO()
    figure.savefig(picture, format='png', dpi=150)
    write_whole(path, lambda file: file.write(picture.getvalue()))


def draw_panel(axes, curves, title, xlabel):
    """
    Curves, (label, style, x, values) with values (seeds, len(x)): the mean as a line, a band from the lowest
    seed to the highest. Returns what label_ends() wants once the axes have their scale.
    """
    ends = []
    for label, style, x, values in curves:
        mean = np.mean(values, axis=0)
        axes.plot(x, mean, **style, linewidth=1.6, markersize=4.5, markevery=max(1, len(x) // 10))
        axes.fill_between(x, np.min(values, axis=0), np.max(values, axis=0), color=style['color'], alpha=0.2,
                          linewidth=0)
        ends.append((label, style['color'], x[-1], mean[-1]))
    axes.set_title(title, fontsize=10, loc='left', parse_math=False)
    axes.set(xlabel=xlabel, ylabel=NATS)
    axes.grid(color='0.9')
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    return ends


def spread(heights, gap):
    """The heights, moved as little as need be to stand at least `gap` apart, in their order."""
    order = np.argsort(heights, kind='stable')
    moved = np.array(heights, dtype=np.float64)[order]
    for _ in range(1000):
        for low in range(len(moved) - 1):
            push = max(gap - (moved[low + 1] - moved[low]), 0) / 2
            moved[low:low + 2] += (-push, push)
    result = np.empty_like(moved)
    result[order] = moved
    return result


def label_ends(axes, ends):
    """
    Labels, (label, colour, x, y), in a column right of the axes, apart from one another, each with a thin
    line from its curve's end. A curve that ends early is labelled above its end.
    """
    axes.autoscale_view()                               # matplotlib would do so only when it draws
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((x, y)) for _, _, x, y in ends]
    last = max(x for x, _ in points)
    late = []
    for (label, colour, _, _), point in zip(ends, points):
        if point[0] >= last - 0.3:
            late.append((label, colour, point))
            continue
        axes.annotate(label, xy=point, xytext=(0, 6), xycoords='axes fraction', textcoords='offset points',
                      color=colour, fontsize=9, ha='center', parse_math=False,
                      bbox=dict(facecolor='white', edgecolor='none', alpha=0.8, pad=0.5))
    inches = axes.get_position().height * axes.figure.get_figheight()
    gap = 11 / 72 / inches                              # 11 points, in heights of the axes
    heights = spread([height for _, _, (_, height) in late], gap)
    for (label, colour, point), height in zip(late, heights):
        line = dict(arrowstyle='-', color=colour, linewidth=0.6, shrinkA=1, shrinkB=2, relpos=(0, 0.5))
        axes.annotate(label, xy=point, xytext=(1.05, height), xycoords='axes fraction',
                      textcoords='axes fraction', color=colour, fontsize=9, va='center', parse_math=False,
                      annotation_clip=False, arrowprops=line)


def thousands(axes):
    """Ticks along the x axis as in 1,000,000."""
    from matplotlib.ticker import MaxNLocator
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter('{x:,.0f}')


def draw_bounds(axes, notes):
    """The losses that a data set's notes say can be reached, as lines across the axes: word_order's."""
    for key, words, side in (('bag_of_words_loss', 'with answers from a bag of words', 'bottom'),
                             ('best_loss', 'at best', 'top')):
        if key in notes:
            axes.axhline(notes[key], color='0.4', linewidth=1, linestyle=':', zorder=0.5)
            axes.margins(y=0.08)                        # room for the text below the lower one
            axes.text(0, notes[key], f' {notes[key]:.3f} {words}', transform=axes.get_yaxis_transform(),
                      color='0.4', fontsize=8, va=side)


# ------------------------------------------------------------------------------------------------------------
# a training run

def draw_loss(log_rows, path, title, notes=()):
    """
    A run's loss.png from the rows of log.csv: the validation loss, and the mean over the training batches
    since the row before, which stands in the middle between the two. notes: those of its data set, see
    draw_bounds().
    """
    tokens, train_losses, val_losses = ([row[column] for row in log_rows] for column in (1, 4, 5))
    middles = [(before + now) / 2 for before, now in zip([0, *tokens], tokens)]
    trained = [(middle, loss) for middle, loss in zip(middles, train_losses) if loss != '']
    curves = [('validation', dict(color='#0072B2', linestyle='-', marker='o'), tokens, [val_losses])]
    if trained:
        x, losses = zip(*trained)
        curves.append(('training', dict(color='#888888', linestyle='-', marker='.'), x, [losses]))
    figure, (axes,) = new_figure(1)
    ends = draw_panel(axes, curves, title, 'tokens read in training')
    thousands(axes)
    draw_bounds(axes, notes)
    label_ends(axes, ends)
    write_figure(figure, path)


# ------------------------------------------------------------------------------------------------------------
# a comparison

def style(group):
    return STYLES.get(group.position, OTHER_STYLE)


def draw_curves(groups, notes, path):
    """
    Validation loss over tokens and over seconds, on the windows that were scored during training, from the
    second evaluation on. notes: those of the data set, see draw_bounds().
    """
    figure, panels = new_figure(2)
    over_tokens, over_seconds = [], []
    for group in groups:
        rows = []                                       # per run {iteration: (tokens, seconds, loss)}
        for run in group.runs.values():
            # the last row's loss is over the whole text, the others' over some windows: take it over those
            losses = [row.val_loss for row in run.log[:-1]] + [run.result['curve_end']]
            rows.append({row.iteration: (row.tokens, row.seconds, loss) for row, loss in zip(run.log, losses)
                         if row.iteration > 0})
        common = sorted(set.intersection(*map(set, rows)))
        numbers = np.array([[row[iteration] for iteration in common] for row in rows])
        tokens, seconds, losses = np.moveaxis(numbers, 2, 0)
        over_tokens.append((group.label, style(group), tokens.mean(axis=0), losses))
        over_seconds.append((group.label, style(group), seconds.mean(axis=0), losses))
    for axes, curves, what in ((panels[0], over_tokens, 'tokens read in training'),
                               (panels[1], over_seconds, 'seconds of training')):
        ends = draw_panel(axes, curves, f'validation loss over {what}', what)
        thousands(axes)
        draw_bounds(axes, notes)
        label_ends(axes, ends)
    write_figure(figure, path)


def draw_lengths(groups, block_size, path):
    """
    Loss against the evaluated length, in sliding windows and in windows side by side. Where the second falls
    and the first does not, a longer window has helped no token but its early ones.
    """
    titles = ['sliding windows: the same tokens, more context', 'windows side by side: fewer early tokens']
    by_length = {group.label: [run.result['by_length'] for run in group.runs.values()] for group in groups}
    ticks = list(groups[0].first.result['by_length'])
    figure, panels = new_figure(2)
    for number, (axes, title) in enumerate(zip(panels, titles)):
        curves = []
        for group in groups:
            results = by_length[group.label]
            lengths = [length for length in ticks if None not in [found[length][number] for found in results]]
            losses = [[found[length][number] for length in lengths] for found in results]
            curves.append((group.label, style(group), lengths, losses))
        ends = draw_panel(axes, curves, title, 'length of the windows read (tokens)')
        axes.set_xscale('log', base=2)
        axes.set_xticks(ticks, map(str, ticks), fontsize=8)
        axes.axvline(block_size, color='0.4', linewidth=1, linestyle=':', zorder=0.5)
        axes.text(block_size, 1, ' trained length', transform=axes.get_xaxis_transform(), color='0.4',
                  fontsize=8, va='top')
        label_ends(axes, [(label if x == ticks[-1] else f'{label} ends', colour, x, y)
                          for label, colour, x, y in ends])
    write_figure(figure, path)


def draw_positions(groups, base, path):
    """
    Loss at each position in the window, as it is and less the base's: where does context help? Averaged over
    bins that widen.
    """
    n_positions = len(base.first.result['by_position'])
    edges = np.unique(np.geomspace(1, n_positions + 1, 25).round().astype(int))     # 1, 2, 3, .. then wider
    middles = np.sqrt(edges[:-1] * (edges[1:] - 1))

    def smoothed(run):
        losses = run.result['by_position']
        return [np.mean(losses[low - 1:high - 1]) for low, high in zip(edges[:-1], edges[1:])]

    losses, against_base = [], []
    for group in groups:
        losses.append((group.label, style(group), middles, [smoothed(run) for run in group.runs.values()]))
        common = sorted(group.runs.keys() & base.runs.keys())
        if common:
            pairs = [np.subtract(smoothed(group.runs[seed]), smoothed(base.runs[seed])) for seed in common]
            against_base.append((group.label, style(group), middles, pairs))
    ticks = [2 ** power for power in range(int(math.log2(n_positions)) + 1)]
    figure, panels = new_figure(2)
    for axes, curves, title in ((panels[0], losses, 'loss by tokens read so far in the window'),
                                (panels[1], against_base, f'the same, less the loss of {base.label}')):
        ends = draw_panel(axes, curves, title, 'tokens read so far')
        axes.set_xscale('log', base=2)
        axes.set_xticks(ticks, map(str, ticks))
        label_ends(axes, ends)
    write_figure(figure, path)
