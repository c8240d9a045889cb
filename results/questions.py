"""
Two questions that the comparison leaves open, asked of trained runs:

    python results/questions.py out/results/tuned/*-seed1337

1. Why is the learned table best at a window's second and third character? If it is because the table says that
   a window has just begun, the gain must go when the same few characters are said to stand in its middle.
2. What do trained models look at, over distance? attention.png: the mean weight that a query gives to the key so
   many characters before it, in each layer.
"""
import os
import sys

import numpy as np
import torch
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from measure import load_model, read_windows, window_starts
from plots import OTHER_STYLE, STYLES, draw_panel, label_ends, new_figure, write_figure
from runs import open_data, read_run

CPU = torch.device('cpu')


@torch.inference_mode()
def early_losses(model, windows, begin):
    """The mean loss at the second, third and fourth character of windows whose first stands at position `begin`."""
    inputs, targets = windows[:, :4], windows[:, 1:5]
    logits, _ = model(inputs, targets, positions=torch.arange(begin, begin + 4))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='none').view(-1, 4).mean(dim=0)[:3]


@torch.inference_mode()
def weight_by_distance(model, windows):
    """The mean attention weight at each distance below half the block, over queries in its second half: (layers, T / 2)."""
    half = windows.size(1) // 2
    total = sum(model.attention(batch).mean(dim=(1, 2)) for batch in windows.split(8)) / len(windows.split(8))
    return np.array([[np.mean(np.diagonal(layer.numpy(), -distance)[half - distance:]) for distance in range(half)]
                     for layer in total])


def main(folders):
    runs = [read_run(folder) for folder in folders]
    tokens, L = open_data(runs[0]).tokens('val'), runs[0].model_args['block_size']
    windows = read_windows(tokens, window_starts(len(tokens), L)[:-1], L, CPU)
    print('| scheme | at the beginning: 2nd, 3rd, 4th | said to be in the middle: 2nd, 3rd, 4th |')
    print('|---|---:|---:|')
    curves = []
    for run in runs:
        model, name = load_model(run, CPU), run.settings['position']
        places = [' '.join(f'{loss:.4f}' for loss in early_losses(model, windows, begin)) for begin in (0, L // 2)]
        print(f'| {name} | {places[0]} | {places[1]} |', flush=True)
        curves.append((name, STYLES.get(name, OTHER_STYLE), weight_by_distance(model, windows[:256, :-1])))
    figure, panels = new_figure(len(curves[0][2]))
    for layer, axes in enumerate(panels):
        x = np.arange(1, len(curves[0][2][layer]) + 1)                          # distance + 1, on an axis of logarithms
        ends = draw_panel(axes, [(name, style, x, [weights[layer]]) for name, style, weights in curves],
                          f'layer {layer + 1}: mean attention weight', 'distance to the key + 1 (characters)')
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.set_ylabel('weight')
        label_ends(axes, ends)
    write_figure(figure, os.path.join(HERE, 'attention.png'))


if __name__ == '__main__':
    main(sys.argv[1:])
