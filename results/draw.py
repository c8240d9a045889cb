"""
Pictures that set several parts of results/ side by side, from their csv files alone:

    python results/draw.py

order.png    does the order survive? Loss less the learned table's, over parameters, tokens and block size
gains.png    what each of RoPE's scalings gains over none, by the length that was trained
"""
import csv
import os
import sys

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from plots import OTHER_STYLE, STYLES, draw_panel, label_ends, new_figure, write_figure

SCALINGS = {'linear': 'rope', 'ntk, dynamic': 'alibi', 'yarn': 't5'}            # and whose style each borrows


def rows_of(part, name):
    path = os.path.join(HERE, part, f'{name}.csv')
    if not os.path.exists(path):
        return []
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def over(parts, x_of):
    """{scheme: (x, mean losses less learned's)} over those of `parts` that have been measured."""
    found = {}
    for part in parts:
        rows = rows_of(part, 'results')
        losses = {name: [float(row['loss']) for row in rows if row['scheme'] == name] for name in STYLES}
        for name, values in losses.items():
            if values and losses['learned']:
                x = x_of(next(row for row in rows if row['scheme'] == 'none' or row['scheme'] == name))
                found.setdefault(name, []).append((x, np.mean(values) - np.mean(losses['learned'])))
    return {name: tuple(zip(*points)) for name, points in found.items()}


def draw_order():
    panels = [('parameters', ('small', 'tuned', 'large'), lambda row: int(row['parameters'])),
              ('characters of training', ('steps325', 'tuned', 'steps3900'), lambda row: int(row['tokens'])),
              ('block size', ('block64', 'tuned', 'block256'),
               lambda row: min(int(key.split('_')[2]) for key in row if key.endswith('_sliding')) * 4)]
    figure, all_axes = new_figure(len(panels))
    for axes, (what, parts, x_of) in zip(all_axes, panels):
        curves = [(name, STYLES[name], x, [y]) for name, (x, y) in over(parts, x_of).items() if len(x) > 1]
        ends = draw_panel(axes, curves, f'loss less that of learned, over {what}', what)
        axes.set_xscale('log')
        axes.set_ylabel('nats per token')
        label_ends(axes, ends)
    write_figure(figure, os.path.join(HERE, 'order.png'))


def draw_gains():
    figure, all_axes = new_figure(2)
    for axes, multiple in zip(all_axes, (2, 4)):
        curves = []
        for name, borrowed in SCALINGS.items():
            points = []
            for part in ('rope32', 'rope64', 'scaling', 'rope256'):
                rows = rows_of(part, 'scaling')
                at = {(row['scaling'], row['run']): float(row['loss_sliding']) for row in rows
                      if int(row['length']) == multiple * int(row['trained_length'])}
                gains = [loss - at['none', run] for (scaling, run), loss in at.items() if scaling == name]
                if gains:
                    points.append((int(rows[0]['trained_length']), gains))
            if points:
                seeds = min(len(gains) for _, gains in points)
                values = np.array([gains[:seeds] for _, gains in points]).T
                curves.append((name, STYLES.get(borrowed, OTHER_STYLE), [x for x, _ in points], values))
        ends = draw_panel(axes, curves, f'read {multiple} times the trained length: loss less unscaled',
                          'trained length L (characters)')
        axes.axhline(0, color='0.4', linewidth=1, linestyle=':')
        axes.set_xscale('log', base=2)
        label_ends(axes, ends)
    write_figure(figure, os.path.join(HERE, 'gains.png'))


if __name__ == '__main__':
    draw_order()
    draw_gains()
