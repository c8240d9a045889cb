"""
The optimizers of a training run: which parameter goes where, and Muon, written out.
"""
import math

import torch


def make_optimizers(model, weight_decay, learning_rate, betas, device_type, optimizer='adamw',
                    muon_learning_rate=0.02, position_rate=1.0):
    """
    A list of one or two. 'adamw': one, which decays what has two dimensions or more, as nanoGPT does. 'muon'
    (Jordan 2024): a second one takes the blocks' matrices c_attn, c_proj and c_fc, and orthogonalises their
    steps; embeddings, norms and everything about positions stay with AdamW, the same for all schemes.

    position_rate: what the scheme's own parameters learn at, in learning rates. AdamW moves every number by
    about the learning rate, and T5's biases have to come to 3 and more, where a weight of a layer needs 0.1.
    They decay as they would at 1. A group's 'rate' says what its learning rate is to be multiplied by.
    """
    matrices, groups = [], {(1.0, True): [], (1.0, False): []}          # by rate, and whether they decay
    for name, parameter in model.named_parameters():
        if optimizer == 'muon' and name.startswith('transformer.h.') and parameter.dim() == 2:
            matrices.append(parameter)
        else:
            rate = position_rate if name.startswith('transformer.wpe.') else 1.0
            groups.setdefault((rate, parameter.dim() >= 2), []).append(parameter)
    groups = [dict(params=parameters, rate=rate, lr=learning_rate * rate,
                   weight_decay=weight_decay / rate if decays else 0.0)
              for (rate, decays), parameters in groups.items()]
    fused = {'fused': True} if device_type in ('cpu', 'cuda') else {}
    optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **fused)]
    if matrices:
        optimizers.append(Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay))
    return optimizers


class Muon(torch.optim.Optimizer):
    """
    Momentum, then each matrix's step orthogonalised: all its directions get the same length (Jordan 2024).
    Steps as torch.optim.Muon does, but in float32 and with matrices of one shape side by side: most CPUs only
    emulate the bfloat16 that torch computes in, and a step of the small default model then takes ten times as
    long.

    parameters: matrices alone. lr: the peak; a matrix with more rows than columns takes sqrt(rows / columns)
    times that.
    """

    def __init__(self, parameters, lr=0.02, weight_decay=0.1, momentum=0.95, ns_steps=5):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, ns_steps=ns_steps)
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameters = [parameter for parameter in group['params'] if parameter.grad is not None]
            for shape in dict.fromkeys(parameter.shape for parameter in parameters):
                alike = [parameter for parameter in parameters if parameter.shape == shape]
                updates = []
                for parameter in alike:
                    state = self.state[parameter]
                    momentum = state.setdefault('momentum_buffer', torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group['momentum'])
                    updates.append(parameter.grad.lerp(momentum, group['momentum']))   # Nesterov's look ahead
                rate = group['lr'] * math.sqrt(max(1, shape[0] / shape[1]))
                for parameter, update in zip(alike, orthogonalise(torch.stack(updates), group['ns_steps'])):
                    parameter.mul_(1 - group['lr'] * group['weight_decay']).sub_(update, alpha=rate)


def orthogonalise(matrices, steps=5):
    """
    Each matrix with its singular values brought near 1: (n, rows, columns) to the same. Newton-Schulz,
    coefficients of Jordan 2024: every step takes x to (a + b g + c g^2) x, with g = x x^T, a polynomial that
    pushes singular values of 0..1 towards 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.transpose(1, 2) if tall else matrices
    x = x.to(torch.promote_types(x.dtype, torch.float32))    # bfloat16 is too coarse to multiply the steps up
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)    # singular values of at most 1
    gram = x @ x.transpose(1, 2)                                # (n, rows, rows), rows being the fewer now
    identity = torch.eye(gram.size(1), device=gram.device, dtype=gram.dtype)
    total = identity       # all polynomials are in one g, so they commute: multiply them up, and x at the end
    for _ in range(steps):
        polynomial = a * identity + b * gram + c * gram @ gram
        total = polynomial @ total
        gram = polynomial @ gram @ polynomial                   # x x^T of the new x
    x = (total @ x).to(matrices.dtype)
    return x.transpose(1, 2) if tall else x
