"""
Which training images caused a prediction?
==========================================

How would the loss on a test image change if one training image had been left out? Influence functions answer without
training again. They need the gradient of each image, and the curvature of the loss. This example compares three scores
with the truth: it trains the network anew without an image, 60 times.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fxgrad

data = load_digits()
order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
images = F.avg_pool2d(torch.tensor(data.images, dtype=torch.float64)[:, None] / 16, 2).flatten(1)[order]  # 4 x 4
labels = torch.tensor(data.target)[order]
x, y, test_x, test_y = images[:150], labels[:150], images[150:650], labels[150:650]
RIDGE = 0.01  # of the weights' squares: the minimum is then unique


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(16, 10).double()


def train(weights):
    """Minimise the weighted sum of the images' losses."""
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def closure():
        optimizer.zero_grad()
        loss = weights @ F.cross_entropy(model(x), y, reduction="none")
        loss = loss + RIDGE * len(y) / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


model = train(torch.ones(len(y), dtype=torch.float64))

# %%
# The gradients of all training images and of one test image, as rows:

gs_model = fxgrad.transform(model, backend="aot_eager")


def gradients(x, y):
    """The gradient of each image's loss: [B, P]."""
    gs_model.zero_grad()
    F.cross_entropy(gs_model(x), y, reduction="sum").backward()
    return torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)


with torch.no_grad():
    losses = F.cross_entropy(model(test_x), test_y, reduction="none")
chosen = int(losses.topk(5).indices[-1])  # a test image that the model finds hard
of_test = gradients(test_x[chosen : chosen + 1], test_y[chosen : chosen + 1])[0]
of_train = gradients(x, y)

# %%
# The Fisher matrix is the mean of g gᵀ over labels that the model itself draws, rather than over the labels of the
# data. With ten classes it can be summed over all of them: one backward for each class, weighted by its probability.

with torch.no_grad():
    probabilities = model(x).softmax(1)
fisher = RIDGE * len(y) * torch.eye(of_train.shape[1], dtype=torch.float64)
for label in range(10):
    rows = gradients(x, torch.full_like(y, label))
    fisher += rows.T @ (probabilities[:, label, None] * rows)

scores = {
    "dot product": of_train @ of_test,
    "cosine": F.cosine_similarity(of_train, of_test[None]),
    "with the Fisher matrix": of_train @ torch.linalg.solve(fisher, of_test),
}

# %%
# The truth, for 60 training images: train without the image, and look at the test image's loss.


def loss_of_test(model):
    with torch.no_grad():
        return F.cross_entropy(model(test_x[chosen : chosen + 1]), test_y[chosen : chosen + 1]).item()


left_out = torch.arange(60)
before, truth = loss_of_test(model), []
for i in left_out.tolist():
    weights = torch.ones(len(y), dtype=torch.float64)
    weights[i] = 0
    truth.append(loss_of_test(train(weights)) - before)
truth = torch.tensor(truth)

figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True)
for axis, (name, score) in zip(axes, scores.items(), strict=True):
    correlation = torch.corrcoef(torch.stack([score[left_out], truth]))[0, 1].item()
    axis.plot(score[left_out], truth, ".")
    axis.set(title=f"{name}\ncorrelation {correlation:.2f}", xlabel="score")
    print(f"{name}: correlation with training anew {correlation:.2f}")
axes[0].set_ylabel("change of the loss")
figure.tight_layout()
plt.show()

# %%
# The dot product alone is a poor guide, and so is the cosine. With the Fisher matrix, the score predicts the change.
# For this model, the Fisher matrix is the exact curvature. For networks it is an approximation.
#
# Now the test image, the images that speak most for its label, and those that speak most against it:

score = scores["with the Fisher matrix"]
figure, axes = plt.subplots(1, 9, figsize=(10, 1.8))
shown = [("test image", test_x[chosen], test_y[chosen])]
shown += [("for it", x[i], y[i]) for i in score.topk(4).indices.tolist()]
shown += [("against it", x[i], y[i]) for i in (-score).topk(4).indices.tolist()]
for axis, (title, image, label) in zip(axes, shown, strict=True):
    axis.imshow(image.view(4, 4), cmap="gray_r")
    axis.set_title(f"{title}\nlabel {label}", fontsize=9)
    axis.axis("off")
figure.tight_layout()
plt.show()

# %%
# This model is convex and has 170 parameters, so its Fisher matrix fits into memory. For networks, project the
# gradients first, with ``fxgrad.GradProjection``; the program ``attribution.py`` shows how.
