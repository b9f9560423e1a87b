"""
What a norm costs, and how fxgrad computes it
=============================================

The norm of a sample's gradient can be computed in several ways: multiply the gradient out, or never do it and work with
the layer's inputs and output gradients instead. Which one is cheaper depends on the shapes. ``fxgrad.explain`` shows
the ways, their costs, and the choice, without running anything.
"""

import matplotlib.pyplot as plt
import torch

import fxgrad


class TextModel(torch.nn.Module):
    """Tokens -> a vector each -> one wide and one narrow layer -> scores of all tokens."""

    def __init__(self, vocabulary=500, width=32):
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, width)
        self.wide = torch.nn.Linear(width, 512)
        self.narrow = torch.nn.Linear(512, width)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens):
        h = self.table(tokens)
        return self.head(h + self.narrow(torch.relu(self.wide(h))))


# %%
# Sequences of 8 tokens, then of 256. The layers are the same.

WEIGHTS = ["table.weight", "wide.weight", "narrow.weight", "head.weight"]
COLOURS = {"gram": "C0", "recompute": "C1", "materialise": "C2", "rows": "C3", "rank_one": "C4"}
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
seen = {}
for axis, length in zip(axes, (8, 256), strict=True):
    tokens = torch.randint(500, (16, length))
    explanation = fxgrad.explain(TextModel(), tokens, quantity=fxgrad.NormSample())
    for i, name in enumerate(WEIGHTS):
        (explained,) = [p for p in explanation.parameters if p.name == name]
        (step,) = explained.steps
        for k, option in enumerate(step.contracted.options):
            chosen = option.way == step.contracted.way
            look = {"color": COLOURS[option.way], "alpha": 1 if chosen else 0.3}
            axis.bar(i + 0.22 * (k - 1), option.milliseconds, 0.2, **look)
            seen[option.way] = plt.Rectangle((0, 0), 1, 1, color=COLOURS[option.way])
    axis.set_xticks(range(len(WEIGHTS)), [name.removesuffix(".weight") for name in WEIGHTS])
    axis.set(title=f"{length} tokens", yscale="log", ylabel="estimated milliseconds")
figure.legend(seen.values(), seen, loc="outside lower center", ncol=len(seen))
plt.show()

# %%
# The strong bars are fxgrad's choices. Where two costs are about equal, it takes the strategy that holds less memory.
# ``gram`` multiplies positions with positions, so its cost grows with the square of the length. ``recompute`` and
# ``materialise`` multiply gradients out, and their cost grows with the layer.
#
# The estimates are those of the machine that built this page. The text has the same with bytes, flops and reasons:

print(fxgrad.explain(TextModel(), torch.randint(500, (16, 8)), quantity=fxgrad.NormSample()))

# %%
# You can override a choice, for one parameter or for all that match a pattern. The numbers stay the same.

model, tokens = TextModel(), torch.randint(500, (16, 8))
found = []
for strategy in (None, "gram", {"*.weight": "recompute"}):
    norms = fxgrad.NormSample()
    measured = fxgrad.transform(model, quantity=norms, strategy=strategy, backend="aot_eager")
    measured(tokens).square().sum().backward()
    found.append(fxgrad.result(measured, norms))
    measured.zero_grad()
torch.testing.assert_close(found[0], found[1])
torch.testing.assert_close(found[0], found[2])
