"""Which training images caused a wrong answer? Influence functions, checked by training again without them.

A small network learns digits of which every seventh or so has a wrong label. Koh and Liang (Understanding Black-box
Predictions via Influence Functions, 2017, https://arxiv.org/abs/1703.04730) predict what the network would answer had
it never seen training image i. The log-odds of test image t's digit would move by

    move(t, i) = g_tᵀ (F + λ + δ)⁻¹ g_i / n

with g_t the gradient of these log-odds, g_i the gradient of image i's loss, λ the weight decay, δ a small damping and n
the number of training images. F is the true Fisher matrix, Σ_i Σ_c p_c ∇log p_c ∇log p_cᵀ / n: fxgrad gives all its
rows, of a batch in which each image stands ten times, once per digit. The prediction is then put to the test: random
tenths of the training images are removed, and the network is trained again without them, from the same beginning.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from claims import Claim
from digits import Digits, load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap
from tqdm import tqdm

import fxgrad

TRAIN, FLIPPED_SHARE, CLASSES = 800, 0.15, 10
WEIGHT_DECAY, DAMPING, LEARNING_RATE, STEPS = 1e-2, 1e-3, 2e-2, 400
REMOVALS, REMOVED_SHARE = 40, 0.1  # to compare moves
WRONG, BLAMED = 12, 20  # test images to repair, and the training images removed for each
MIN_CORRELATION, MAX_DIFFERENCE = 0.7, 1e-4
INFLUENCE, DOT, ALIKE = "influence", "gradients alike", "images alike"


class Repair(NamedTuple):
    """What removing the blamed images does, beside as many random ones."""

    images: Tensor  # [WRONG], numbers of wrongly answered test images
    blamed: Tensor  # [WRONG, BLAMED], training images, the worst first
    without_blamed: Tensor  # [WRONG], the answers of networks trained without them
    without_random: Tensor  # [WRONG], the answers of networks trained without random ones


class Influence(NamedTuple):
    data: Digits
    predicted: Tensor  # [tests, REMOVALS]
    measured: Tensor  # [tests, REMOVALS]
    correlations: dict[str, float]
    difference: float  # of the gradients from those of a loop, the largest over the largest gradient
    test_answers: Tensor  # [tests]
    repair: Repair

    def repaired(self, answers: Tensor) -> int:
        """The number of test images that `answers` get right."""
        return int((answers == self.data.test_truth[self.repair.images]).sum())

    @property
    def slope(self) -> float:
        """How many times as large as predicted the moves are, by least squares around each test image's mean."""
        a, b = centred(self.predicted), centred(self.measured)
        return ((a * b).sum() / a.square().sum()).item()

    def rows_to_show(self, count: int) -> list[int]:
        """The repairs with the most wrong labels among the blamed images."""
        wrong = (self.data.labels != self.data.truth)[self.repair.blamed].sum(1)
        return wrong.argsort(descending=True, stable=True)[:count].tolist()

    def claims(self) -> list[Claim]:
        ours, alike = self.correlations[INFLUENCE], self.correlations[ALIKE]
        blamed, random = self.repaired(self.repair.without_blamed), self.repaired(self.repair.without_random)
        return [
            Claim("largest difference from a loop over single images", self.difference, "<=", MAX_DIFFERENCE),
            Claim("predicted and measured moves correlate", ours, ">=", MIN_CORRELATION),
            Claim("the same, beside guessing by likeness plus 0.1", ours, ">=", alike + 0.1),
            Claim("wrong answers repaired by removing the blamed images", blamed, ">=", 0.75 * WRONG),
            Claim("wrong answers repaired by removing random images", random, "<=", 0.5 * WRONG),
        ]


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def train(data: Digits, kept: Tensor, steps: int, title: str) -> dict[str, Tensor]:
    """Train one network for each row of `kept` [networks, n], all from the same start: {name: [networks, *shape]}."""
    torch.manual_seed(0)
    model = make_mlp()
    state = {name: p.detach().expand(len(kept), *p.shape).clone() for name, p in model.named_parameters()}
    parameters = [p.requires_grad_() for p in state.values()]

    def loss(one: dict[str, Tensor], weight: Tensor) -> Tensor:
        logits = functional_call(model, one, (data.images,))
        losses = F.cross_entropy(logits, data.labels, reduction="none")
        penalty = sum(p.square().sum() for p in one.values()) * WEIGHT_DECAY / 2
        return losses @ weight / weight.sum() + penalty

    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in tqdm(range(steps), desc=title, unit="step"):
        optimizer.zero_grad()
        vmap(loss)(state, kept).sum().backward()
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in state.items()}


def logits_of(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The logits of all networks: [networks, B, CLASSES]."""
    model = make_mlp()
    return vmap(lambda one: functional_call(model, one, (x,)))(state)


def log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """log(p / (1 - p)) of each row's digit: [B]."""
    others = logits.masked_fill(F.one_hot(y, CLASSES).bool(), -torch.inf)
    return logits.gather(-1, y[:, None])[:, 0] - others.logsumexp(-1)


def rows(gs_model: nn.Module, values: Tensor) -> Tensor:
    """The gradient of each sample's value with respect to all parameters: [B, parameters]."""
    values.sum().backward()
    grads = [fxgrad.delivered(p).flatten(1) for p in gs_model.parameters()]
    fxgrad.zero_grad(gs_model)
    return torch.cat(grads, dim=1)


def fisher_matrix(gs_model: nn.Module, x: Tensor) -> Tensor:
    """Σ_i Σ_c p_c ∇log p_c(x_i) ∇log p_c(x_i)ᵀ / n, from a batch that has each image once per class."""
    repeated = x.repeat_interleave(CLASSES, dim=0)
    classes = torch.arange(CLASSES).repeat(len(x))
    log_p = F.log_softmax(gs_model(repeated), dim=1).gather(1, classes[:, None])[:, 0]
    weighted = rows(gs_model, log_p * (log_p.detach() / 2).exp())  # √p_c ∇log p_c
    return weighted.T @ weighted / len(x)


def loop_rows(model: nn.Module, data: Digits) -> Tensor:
    """The gradients of the training images' losses by plain autograd, one image at a time."""
    parameters = list(model.parameters())
    found = []
    for x, y in zip(tqdm(data.images, desc="influence: checking", unit="image"), data.labels, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), parameters)
        found.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(found)


def moves(gs_model: nn.Module, data: Digits, train_rows: Tensor, test_rows: Tensor) -> Tensor:
    """move(t, i): how test image t's log-odds move if training image i is removed, [tests, n]."""
    curvature = fisher_matrix(gs_model, data.images)
    curvature += (WEIGHT_DECAY + DAMPING) * torch.eye(len(curvature))
    return test_rows @ torch.linalg.solve(curvature, train_rows.T) / len(data.labels)


def similarity(model: nn.Sequential, data: Digits) -> Tensor:
    """The same without gradients: hidden features alike speak for the image's label, [tests, n]."""
    with torch.no_grad():
        train_features, test_features = model[:-1](data.images), model[:-1](data.test_images)
    mean = train_features.mean(0)
    cosines = F.normalize(test_features - mean) @ F.normalize(train_features - mean).T
    return torch.where(data.test_truth[:, None] == data.labels, -cosines, cosines)


def correlation(predicted: Tensor, measured: Tensor) -> float:
    """The correlation over removals, the mean over test images."""
    return F.cosine_similarity(centred(predicted), centred(measured), dim=1).mean().item()


def centred(values: Tensor) -> Tensor:
    """The differences from each row's mean."""
    return values - values.mean(1, keepdim=True)


def run(quick: bool = False, backend: str = "inductor") -> Influence:
    data = load_digits(TRAIN, FLIPPED_SHARE)
    steps, removals = (20, 4) if quick else (STEPS, REMOVALS)
    generator = torch.Generator().manual_seed(0)
    removed = torch.stack([random_images(round(REMOVED_SHARE * TRAIN), generator) for _ in range(removals)])
    kept = torch.cat([torch.ones(1, TRAIN), 1 - removed])  # the first network has them all
    trained = train(data, kept, steps, f"influence: {len(kept)} networks")
    model = make_mlp()
    model.load_state_dict({name: p[0] for name, p in trained.items()})
    with torch.no_grad():
        logits = logits_of(trained, data.test_images)
        odds = torch.stack([log_odds(one, data.test_truth) for one in logits], dim=1)
    measured = odds[:, 1:] - odds[:, :1]

    gs_model = fxgrad.transform(model, backend=backend)  # the same parameters; its backward fills p.grad_sample
    train_rows = rows(gs_model, F.cross_entropy(gs_model(data.images), data.labels, reduction="none"))
    test_rows = rows(gs_model, log_odds(gs_model(data.test_images), data.test_truth))
    scores = moves(gs_model, data, train_rows, test_rows)
    methods = {INFLUENCE: scores, DOT: test_rows @ train_rows.T, ALIKE: similarity(model, data)}
    correlations = {name: correlation(found @ removed.T, measured) for name, found in methods.items()}
    expected = loop_rows(model, data)
    difference = ((train_rows - expected).abs().max() / expected.abs().max()).item()
    answers = logits[0].argmax(1)
    repair = repair_answers(data, answers, scores, steps, generator)
    return Influence(data, scores @ removed.T, measured, correlations, difference, answers, repair)


def random_images(count: int, generator: torch.Generator) -> Tensor:
    """[n]: 1 for `count` training images, 0 for the others."""
    return torch.zeros(TRAIN).index_fill_(0, torch.randperm(TRAIN, generator=generator)[:count], 1.0)


def repair_answers(data: Digits, answers: Tensor, scores: Tensor, steps: int, generator: torch.Generator) -> Repair:
    """Train without the images that are blamed for a wrong answer, and without as many random ones."""
    images = (answers != data.test_truth).nonzero()[:WRONG, 0]
    blamed = scores[images].topk(BLAMED).indices
    without_blamed = torch.ones(len(images), TRAIN).scatter_(1, blamed, 0.0)
    without_random = 1 - torch.stack([random_images(BLAMED, generator) for _ in images])
    trained = train(data, torch.cat([without_blamed, without_random]), steps, "influence: repairs")
    with torch.no_grad():
        found = logits_of(trained, data.test_images).argmax(2)  # [2 · WRONG, tests]
    first, second = found.split(len(images))
    own = torch.arange(len(images))
    return Repair(images, blamed, first[own, images], second[own, images])
