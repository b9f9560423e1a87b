"""
Several records of one person
=============================

A person often has several records: messages, visits, images. Clipping each record protects a record, not the person:
somebody with eight records moves the model up to eight times as far. This example makes a person the unit that is
clipped, by ``group_size``.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fxgrad

torch.manual_seed(0)
data = load_digits()
x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
C, RECORDS, PEOPLE = 1.0, 8, 40

# %%
# People have 1 to 8 images each, and every person writes the same digit all the time. A batch has eight rows for each
# person, one behind the other. Rows that nobody fills are padding, and count for nothing.

counts = torch.randint(1, RECORDS + 1, (PEOPLE,))
rows = torch.stack([torch.multinomial((y == person % 10).float(), RECORDS) for person in range(PEOPLE)])  # [40, 8]
filled = torch.arange(RECORDS) < counts[:, None]


def loss_of(model):
    losses = F.cross_entropy(model(x[rows.flatten()]), y[rows.flatten()], reduction="none")
    return (losses * filled.flatten()).sum()


# %%
# ``group_size=8`` makes eight consecutive rows one sample. Its gradient is the sum over these rows, and its norm is
# taken of that sum.

by_person = fxgrad.ClippedGrad(max_grad_norm=C, group_size=RECORDS)
by_record = fxgrad.ClippedGrad(max_grad_norm=C)


def clip(quantity):
    """Return the clipped sum, as one vector."""
    transformed = fxgrad.transform(model, quantity=quantity, backend="aot_eager")
    loss_of(transformed).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()]), fxgrad.result(transformed, quantity)
    transformed.zero_grad()
    return found


sum_by_person, of_people = clip(by_person)
sum_by_record, of_records = clip(by_record)
print(of_people.norm_sample.shape, of_records.norm_sample.shape)

# %%
# How far does each person move the sum? The gradients of single rows answer: a person's part is the weighted sum of
# the person's rows.

gs_model = fxgrad.transform(model, backend="aot_eager")
loss_of(gs_model).backward()
single = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)  # [320, P]
gs_model.zero_grad()
people = single.view(PEOPLE, RECORDS, -1)
part_by_person = (people.sum(1) * of_people.weight[:, None]).norm(dim=1)
part_by_record = (people * of_records.weight.view(PEOPLE, RECORDS, 1)).sum(1).norm(dim=1)

plt.plot(counts, part_by_record, "o", alpha=0.6, label="each record clipped")
plt.plot(counts, part_by_person, "o", alpha=0.6, label="each person clipped")
plt.axhline(C, color="0.4", linestyle="--", label="C, the promised bound")
plt.xlabel("records of a person")
plt.ylabel("length of the person's part of the sum")
plt.legend()
plt.show()
print(f"the longest part: {part_by_record.max():.2f} C by record, {part_by_person.max():.2f} C by person")

# %%
# The parts add up to the sums that the backwards delivered, and no person passes the bound:

torch.testing.assert_close((people.sum(1) * of_people.weight[:, None]).sum(0), sum_by_person, rtol=1e-4, atol=1e-5)
assert part_by_person.max() <= C * (1 + 1e-5)
