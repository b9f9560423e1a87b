"""A speech recogniser with CTC: conv, LSTM, and each utterance's gradient clipped. Some transcripts are wrong.

    python examples/speech_ctc.py [--steps 200] [--batch 32]

An utterance is a word of 2 to 5 letters, and each letter sounds for 3 to 6 frames of 8 noisy features. The CTC loss
stands outside of the model and takes each utterance's own length. Every tenth transcript is wrong: clipping bounds what
it does, and the norms show it. The exit code is 1 if the last clipped sum is not that of a loop over the utterances,
each cut to its own length.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence

import fxgrad

LETTERS, FEATURES, C = 6, 8, 1.0  # class 0 is CTC's blank


class Recogniser(nn.Module):
    """Features [B, T, features] to log-probabilities [B, T, classes]. No frame reads what follows its neighbour."""

    def __init__(self, width=32):
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, width, 3, padding=1)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, LETTERS + 1)

    def forward(self, x):
        frames = F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.lstm(frames)[0]).log_softmax(2)


def speak(sounds, batch):
    """Utterances [B, T, features], their lengths [B], transcripts [B, S], their sizes [B], and which are wrong [B]."""
    words = [torch.randint(LETTERS, (int(torch.randint(2, 6, ())),)) for _ in range(batch)]
    heard = [sounds[word].repeat_interleave(torch.randint(3, 7, word.shape), 0) for word in words]
    heard = [frames + 0.3 * torch.randn_like(frames) for frames in heard]
    wrong = torch.rand(batch) < 0.1
    written = [1 + (word + other) % LETTERS for word, other in zip(words, wrong, strict=True)]
    lengths, sizes = (torch.tensor([len(one) for one in each]) for each in (heard, words))
    return pad_sequence(heard, batch_first=True), lengths, pad_sequence(written, batch_first=True), sizes, wrong


def losses(model, x, lengths, written, sizes):
    """The CTC loss of each utterance, per letter: [B]."""
    scores = model(x).transpose(0, 1)  # [T, B, classes], as ctc_loss takes them
    return F.ctc_loss(scores, written, lengths, sizes, reduction="none") / sizes


def loop(model, x, lengths, *written):
    """The clipped sum by plain autograd, one utterance at a time; all parameters in one vector."""
    total = 0.0
    for i, length in enumerate(lengths):
        loss = losses(model, x[i : i + 1, :length], lengths[i : i + 1], *[each[i : i + 1] for each in written]).sum()
        row = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        total = total + row * (C / row.norm()).clamp(max=1)
    return total


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a CTC speech recogniser with clipped gradients.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    sounds, model, clipped = torch.randn(LETTERS, FEATURES), Recogniser(), fxgrad.ClippedGrad(max_grad_norm=C)
    gs_model = fxgrad.transform(model, quantity=clipped, backend=options.backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    print("step    loss   median norm: of right transcripts   of wrong ones")
    for step in range(options.steps):
        *batch, wrong = speak(sounds, options.batch)
        gs_model.zero_grad()
        loss = losses(gs_model, *batch).sum()
        loss.backward()
        norms = fxgrad.result(gs_model, clipped).norm_sample  # [B]: before the clipping
        if step % max(1, options.steps // 10) == 0:
            mean = loss.item() / options.batch
            print(f"{step:4d} {mean:7.3f} {norms[~wrong].median():34.2f} {norms[wrong].median():15.2f}")
        if step == options.steps - 1:  # before the parameters move on
            expected = loop(model, *batch)
            ours = parameters_to_vector(p.grad for p in model.parameters())
            difference = (ours - expected).norm() / expected.norm()
        for p in model.parameters():
            p.grad /= options.batch
        optimizer.step()

    good = difference.item() <= 1e-3
    print(f"the last clipped sum is {difference:.1e} from that of a loop, relative:", "good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
