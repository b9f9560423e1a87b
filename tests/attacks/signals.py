"""Convolutions, norms, transforms and matrices that find the samples on another dimension than the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks, steps


def as_kernel(m: Any, x: Tensor) -> Tensor:
    """The first sample is convolved with all."""
    return m(x + F.conv1d(steps(x)[:1].mT, steps(x).mT[:, :, :1])[0].t().mean(0)[:, None])


ATTACKS = attacks(
    "doors",
    right={
        "a transform of features": lambda m, x: m(x + torch.fft.fft(x, dim=1).real),
        "a solution for each": lambda m, x: m(torch.linalg.solve(torch.eye(3) + x[:, :, None] * x[:, None], x)),
        "an exponential of each": lambda m, x: m(torch.linalg.matrix_exp(x[:, :, None] * x[:, None] / 9).sum(1)),
        "a norm of each sample": lambda m, x: F.group_norm(m(x), 1),
        "a norm of each image": lambda m, x: F.instance_norm(m(steps(x))).sum(1),
        "weights of one's own norm": lambda m, x: F.linear(x, m.weight / m.weight.norm()),
        "samples as groups": lambda m, x: m(F.conv1d(x[None], torch.ones(x.shape[0], 1, 1), groups=x.shape[0])[0]),
        "a norm of halves of samples": lambda m, x: m(
            torch.native_group_norm(steps(x), None, None, x.shape[0] * 2, 2, 3, 1, 1e-5)[0]
        ).sum(1),
        "viewed as integers and back": lambda m, x: m(x.view(torch.int64).view(torch.float64)),
        "a trapezoid of features": lambda m, x: m(torch.cumulative_trapezoid(x, dim=1)[:, :1] + x),
    },
    refused={
        "two dimensions transformed": lambda m, x: m(torch.fft.fft2(x).real),
        "all dimensions transformed": lambda m, x: m(torch.fft.fftn(x).real),
        "transformed and back, though right": lambda m, x: m(
            torch.fft.irfft(torch.fft.rfft(x, dim=0), n=x.shape[0], dim=0)
        ),
        "samples as groups, transposed, though right": lambda m, x: m(
            F.conv_transpose1d(x[None], torch.ones(x.shape[0], 1, 1), groups=x.shape[0])[0]
        ),
        "a kernel of the mean": lambda m, x: m(F.conv1d(x[:, None], x.mean(0)[None, None, :1])[:, 0]),
        "a kernel of each, for the first": as_kernel,
        "a layer as a kernel, though right": lambda m, x: F.conv1d(x.t()[None], m.weight[:, :, None])[0].t(),
        "an image of samples, padded": lambda m, x: m(
            F.conv1d(x.t()[:, None], torch.ones(1, 1, 3), padding=1)[:, 0].t()
        ),
        "an image of samples, pooled": lambda m, x: m(F.max_pool2d(x[None, None], (3, 1), 1, (1, 0))[0, 0]),
        "a norm of batches": lambda m, x: m(torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0]),
        "normalised by a call": lambda m, x: m(torch._weight_norm(x, torch.ones(1, 3), 1)),
        "the norm of a matrix of samples": lambda m, x: m(x / torch.linalg.matrix_norm(x)),
        "a layer times the batch's norm": lambda m, x: F.linear(x, m.weight / m.weight.norm()) * x.norm(),
        "a solution of all": lambda m, x: m(torch.linalg.solve(torch.eye(3) + x.t() @ x, x.t()).t()),
        "a triangle of ones, solved": lambda m, x: m(
            torch.linalg.solve_triangular(torch.ones(x.shape[0], x.shape[0]).tril(), x, upper=False)
        ),
        "bilinear with flipped samples": lambda m, x: F.bilinear(x, x.flip(0), m.weight.expand(2, 3, 3)),
        "a grid of other samples": lambda m, x: m(
            x + F.grid_sample(x.view(-1, 1, 1, 3), x.flip(0)[:, None, None, :2], align_corners=False).view(-1, 1)
        ),
        "complex, with the flipped": lambda m, x: m(torch.complex(x, x.flip(0)).abs()),
        "complex, flipped": lambda m, x: m(torch.view_as_real(torch.complex(x, x).flip(0))[..., 0]),
        "a logarithm of running sums": lambda m, x: m(x.logcumsumexp(0)),
        "an own product with one, though right": lambda m, x: m(torch.kron(x, torch.ones(1, 1))),
        "times a unit matrix, though right": lambda m, x: m(torch.eye(x.shape[0]) @ x),
        "a norm of one group of all": lambda m, x: m(
            torch.native_group_norm(x, None, None, 1, 3, x.shape[0], 1, 1e-5)[0]
        ),
        "a draw over samples": lambda m, x: m(F.gumbel_softmax(x, dim=0)),
    },
)
