"""
An LSTM over sequences of different lengths
===========================================

Per-sample gradients of recurrent layers need no replacement of the layer: nn.LSTM works as it is, with packed
sequences of different lengths, too. Here an LSTM reads a digit row by row, and the reading may end early. The norms of
single gradients show which digits the network still has to learn, and at which length.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.utils.rnn import pack_padded_sequence

import fxgrad

torch.manual_seed(0)
data = load_digits()
x, y = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)  # [1797, 8 rows, 8 pixels]


class Reader(torch.nn.Module):
    """Read the first rows of each image, and name its digit."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 48, batch_first=True)
        self.head = torch.nn.Linear(48, 10)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        return self.head(state[0])


# %%
# It is trained on images of which 3 to 8 rows are read. One graph serves all lengths and batch sizes.

model = Reader()
norms = fxgrad.NormSample()
measured = fxgrad.transform(model, quantity=[fxgrad.Grad(), norms], backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for _ in range(150):
    batch, lengths = torch.randint(len(y), (128,)), torch.randint(3, 9, (128,))
    measured.zero_grad()
    F.cross_entropy(measured(x[batch], lengths), y[batch], reduction="sum").backward()
    for p in model.parameters():
        p.grad /= 128
    optimizer.step()

# %%
# Now each image is read for 1 to 8 rows, with the share of right answers beside the norms.

found, right = [], []
for rows in range(1, 9):
    measured.zero_grad()
    out = measured(x, torch.full((len(y),), rows))
    F.cross_entropy(out, y, reduction="sum").backward()
    right.append(out.argmax(1) == y)
    found.append(fxgrad.result(measured, norms))
found, right = torch.stack(found), torch.stack(right).float()  # [8, 1797]

figure, (left, beside) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for digit in (0, 1, 4, 7):
    left.plot(range(1, 9), found[:, y == digit].median(1).values, "-o", label=f"digit {digit}")
    beside.plot(range(1, 9), right[:, y == digit].mean(1), "-o", label=f"digit {digit}")
left.set(xlabel="rows read", ylabel="median norm of an image's gradient", yscale="log")
beside.set(xlabel="rows read", ylabel="share of right answers")
left.legend()
plt.show()

# %%
# A short sequence uses the weights few times, so its gradient is small even if the answer is wrong. Beyond four rows,
# the norm falls for the digits 0 and 4. For 1 and 7 it stays large although most answers are right: these images still
# move the weights, and accuracy alone does not show that.

# %%
# One of these norms beside plain autograd:

measured.zero_grad()
alone = F.cross_entropy(model(x[:1], torch.tensor([8])), y[:1])
expected = torch.cat([g.flatten() for g in torch.autograd.grad(alone, list(model.parameters()))]).norm()
torch.testing.assert_close(found[7, 0], expected, rtol=1e-3, atol=1e-6)
