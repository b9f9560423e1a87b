"""Where rows go: index arithmetic, shifts, views, reshapes, lookups, scans."""

from __future__ import annotations

from tests.steps.step import Table
from tests.steps.texts import texts

INDICES: Table = texts(
    "indices",
    apart={
        "merged and split": "{m}({x}.repeat_interleave(4, 0)).view({B}, 4, {C}).sum(1)",
        "positions of merged rows": "{x} * {x}.reshape(-1)[torch.arange({B}) * {C} + 1][:, None]",
        "columns by a constant": "{x}[:, torch.arange({C}) % 2]",
        "an own column": "{x} * {x}[torch.arange({B}), {ids}][:, None]",
        "each sample repeated": "{m}({x}[torch.arange(2 * {B}) // 2]).view(-1, 2, {C}).sum(1)",
        "flipped twice": "{m}({x}.flip(0).flip(0))",
        "take_along_dim": "torch.take_along_dim({x}, {x}.argsort(1), 1)",
    },
    mixes={
        "a band": "torch.ones({B}, {B}).tril(-1) @ {x} + {x}",
        "a triangle": "torch.ones({B}, {B}).tril() @ {x}",
        "diff": "torch.diff({x}, dim=0, prepend={x}[:1])",
        "a constant index": "{x} - {x}[torch.tensor([0])]",
        "the last": "{x} + {x}.unbind(0)[-1]",
        "take": "torch.take({x}, torch.arange({x}.numel()).view_as({x}).flip(0))",
    },
    depends={
        "beyond the fifth": "{x} + {x}[min({B}, 5) :].sum(0)",
        "rotated diagonal": "torch.eye({B}).roll(5, 0) @ {x}",
        "a band far off": "torch.ones({B}, {B}).tril(-4) @ {x} + {x}",
        "padded by six": "{x} + F.pad({x}, (0, 0, 6, 0))[:{B}]",
    },
    either={
        "getitem": "{m}({x})[{i}]",
        "getitem before": "{m}({x}[{i}])",
        "index_select": "{x}.index_select(0, {i}).tanh()",
        "gather": "{x}.gather(0, {i}[:, None].expand(-1, {C}))",
        "take_along_dim of samples": "torch.take_along_dim({x}, {i}[:, None].expand(-1, {C}), 0)",
        "index_add": "{m}(torch.zeros_like({x}).index_add(0, {i}, {x}))",
        "index_copy": "{m}(torch.zeros_like({x}).index_copy(0, {i}, {x}))",
        "scatter_add": "{m}(torch.zeros_like({x}).scatter_add(0, {i}[:, None].expand(-1, {C}), {x}))",
        "scatter_reduce": 'torch.zeros_like({x}).scatter_reduce(0, {i}[:, None].expand(-1, {C}), {x}, "sum")',
        "index_put": "torch.zeros_like({x}).index_put(({i},), {x}, accumulate=True).sin()",
        "index_fill": "{x} + {x}[{i}].detach()",
        "embedding of rows": "F.embedding({i}, {x}).tanh()",
        "an index written by _foreach_": "{z} = {i}.clone()\ntorch._foreach_add_([{z}], [{i}])\n{x}[{z} // 2]",
        "an index written by out=": "{z} = torch.arange({B})\ntorch.add({i}, 0, out={z})\n{x}[{z}]",
        "a product with one-hot": "F.one_hot({i}, {B}).to({x}.dtype) @ {x}",
        "a product of one-hot, transposed": "F.one_hot({i}, {B}).to({x}.dtype).t() @ {x}",
        "columns and rows": "{x}[{i}[:, None], torch.arange({C})]",
        "an index of an index": "{m}({x}[torch.arange({B})[{i}]])",
        "the order of the index": "{x}[{i}.argsort()]",
    },
)

VIEWS: Table = texts(
    "views",
    apart={
        "repeated, and back": "{m}({x}.repeat(2, 1)).view(2, {B}, {C}).mean(0)",
        "repeated inside, and back": "{m}({x}.repeat_interleave(2, 0)).view({B}, 2, {C}).mean(1)",
        "transposed, and back": "{m}({x}.t().contiguous().t())",
        "heads": "{m}({x}).view({B}, {C}, 1).transpose(1, 2).reshape({B}, {C})",
        "patches": "{m}(F.unfold({x}.view({B}, 1, 1, {C}), (1, {C})).squeeze(2))",
        "expanded": "{m}({x}.unsqueeze(1).expand(-1, 4, -1)).sum(1)",
        "flattened": "{m}({x}.unsqueeze(1).expand(-1, 4, -1).reshape(-1, {C})).view(-1, 4, {C}).sum(1)",
        "chunks": "torch.cat([part * 2 for part in {m}({x}).chunk(3, 1)], 1)",
        "stacked in front": "{m}(torch.stack([{x}, {x} * 2])).sum(0)",
        "cat with itself": "sum({m}(torch.cat([{x}, {x} * 2])).view(2, -1, {C}))",
        "a dimension more": "{m}({x}[None])[0]",
        "moved": "{m}({x}.unsqueeze(2).movedim(0, 2).movedim(2, 0).squeeze(2))",
        "einsum": '{m}(torch.einsum("ij->ji", {x}).t())',
        "unflattened": "{m}({x}.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1)).unflatten(0, (-1, 2)).sum(1)",
        "matrices": "({m}({x}).unsqueeze(2) @ {x}.unsqueeze(1)).sum(2)",
        "bmm": "torch.bmm({x}[:, :, None], {x}[:, None]).sum(1)",
        "channels shuffled": (
            "{m}(F.channel_shuffle({x}[:, :2].reshape(-1, 2, 1, 1), 2).reshape(-1, 2).repeat(1, {C})[:, :{C}])"
        ),
        "as_strided": "{x}.clone(memory_format=torch.contiguous_format).as_strided(({B}, {C}), ({C}, 1), 0).sin()",
    },
    mixes={
        "viewed as C": "{m}({x}.reshape({C}, -1).t().contiguous())",
        "columns as rows": "{m}({x}.t().reshape(-1, {C}))",
        "windows": "{m}(torch.cat([{x}[:1], {x}, {x}[-1:]]).unfold(0, 3, 1).mean(-1))",
        "interleaved": "{m}({x}.repeat(2, 1).view({B}, 2, {C}).mean(1))",
        "strided by less": "{x}.clone().as_strided(({B}, {C}), ({C} - 1, 1), 0).tanh()",
        "expanded from one": "{x} + {x}[:1].expand({B}, -1)",
        "heads of others": "{x}.reshape({C}, {B}, 1).transpose(0, 1).reshape({B}, {C}).tanh()",
        "swapped axes": "{x}.swapaxes(0, 1).reshape({x}.shape)",
        "padded around": '{m}(F.pad({x}.t()[None], (1, 0), mode="circular")[0].t()[: {B}])',
        "features as samples": "{x} @ ({x}.t() @ {x})",
        "softmax in heads": "{x}.view(1, {B}, {C}).softmax(1)[0]",
        "group norm of one": "F.group_norm({x}.t()[None], 1)[0].t()",
        "layer norm over all": "F.layer_norm({x}.t(), ({B},)).t()",
        "convolution": "F.conv1d({x}.t()[None], torch.ones({C}, 1, 3), padding=1, groups={C})[0].t()",
        "interpolated": 'F.interpolate({x}.t()[None], scale_factor=2, mode="linear")[0].t()[: {B}]',
        "pooled": "F.max_pool1d({x}.t()[None], 3, 1, 1)[0].t()",
        "attention": "F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None])[0]",
        "fft": "torch.fft.fft({x}, dim=0).abs()",
        "distances": "{x} * torch.cdist({x}, {x} + 1).sum(1, keepdim=True)",
        "kron": "torch.kron({x}, torch.ones(2, 1))[: {B}]",
    },
    either={
        "a layer of it": "{m}({o})",
        "beside a layer": "{m}({x}) + {o}",
        "a product": "{m}({x}) * {o}",
        "a gate": "{x} * {o}.detach().sigmoid()",
        "a mask": "{m}({x}).masked_fill({o} > 0, 0.1)",
        "where": "torch.where({o} > 0, {m}({x}), 0.2)",
        "stacked": "{m}(torch.stack([{x}, {o}], 1)).sum(1)",
        "concatenated": "{m}(torch.cat([{x}, {o}], 1)[:, {C}:])",
        "weights of each sample": "torch.bmm({W}[None] * {o}[:, None, :], {x}[:, :, None]).squeeze(2)",
        "a sum over its columns": "{m}({x}) * {o}.sum(1, keepdim=True)",
        "a cross-attention": (
            "F.scaled_dot_product_attention({x}[:, None], {o}[:, None], {o}[:, None]).squeeze(1) + {x}"
        ),
        "cosine": "{x} * F.cosine_similarity({x}, {o}, 1, eps=0.1)[:, None]",
        "einsum of both": '{x} * torch.einsum("bi,bi->b", {x}, {o})[:, None]',
        "a loss for each": 'F.mse_loss({m}({x}), {o}, reduction="none")',
        "no_grad": "with torch.no_grad():\n    {z} = {o} * 0.5\n{m}({x}) + {z}",
        "a detached teacher": 'F.kl_div({m}({x}).log_softmax(1), {o}.detach().softmax(1), reduction="none")',
        "maximum": "torch.maximum({x}, {o})",
        "an outer sum": "({x}[:, :, None] + {o}[:, None, :]).tanh().sum(2)",
    },
)

LOOKUPS: Table = texts(
    "lookups",
    apart={
        "an embedding of ids": "{x} + F.embedding({ids}, {W})",
        "a row by id": "{x} * {W}[{ids}]",
        "a product with one-hot": "F.one_hot({ids}, {C}).to({x}.dtype) @ {W} + {x}",
        "a loss by id": '{x} * F.cross_entropy({m}({x}), {ids}, reduction="none")[:, None]',
        "a gather by id": "{x} * {m}({x}).gather(1, {ids}[:, None])",
        "a mask by id": "{m}({x}) * ({ids} > 0)[:, None]",
        "a bag": 'F.embedding_bag({x}.argsort(1), {W}, mode="sum")',
        "index_select by id": "{W}.index_select(0, {ids}) * {x}",
        "smoothed labels": '{x} * F.cross_entropy({m}({x}), {ids}, reduction="none", label_smoothing=0.1)[:, None]',
        "places in an own sequence": "{x} * torch.searchsorted({x}.detach().sort(1).values, {x}.detach())",
        "a margin": '{x} * F.multi_margin_loss({m}({x}), {ids}, reduction="none")[:, None]',
        "sorted by a feature, and back": "{z} = {x}[:, 0].argsort()\n{m}({x}[{z}])[{z}.argsort()]",
    },
    mixes={
        "capacity": "{z} = F.one_hot({ids}, {C}).cumsum(0).gather(1, {ids}[:, None])\n{m}({x}) * ({z} <= 1)",
        "prototypes": (
            "{z} = F.one_hot({ids}, {C}).to({x}.dtype)\n{x} @ (({z}.t() @ {x}) / {z}.sum(0).clamp(min=1)[:, None]).t()"
        ),
        "an embedding of the batch": "F.embedding({ids} % {B}, {x})",
        "rows by ids of the batch": "{m}({x})[{ids} % {B}]",
        "the next sample's class": '{x} * F.cross_entropy({m}({x}), {ids}.roll(1, 0), reduction="none")[:, None]',
        "scaled by frequency": "F.embedding({ids}, {W}, scale_grad_by_freq=True) + {x}",
        "a mask of duplicates": "{m}({x}) * ({ids}[:, None] == {ids}[None]).sum(1)[:, None]",
        "a running count": "{m}({x}) * {ids}.cumsum(0)[:, None]",
        "the most frequent class": "{m}({x}) + F.embedding({ids}.mode().values, {W})",
        "buckets of the batch": "{m}({x}) * torch.bucketize({x}[:, :1].detach(), {x}[:, 0].detach().sort().values)",
        "places in each other": "{x} * torch.searchsorted({x}.detach().sort(1).values, {x}.detach().flip(0))",
        "an id's rank": "{m}({x}) * {ids}.argsort()[:, None]",
        "classes' weights": (
            "{x} * F.cross_entropy({m}({x}), {ids}, F.one_hot({ids}, {C}).sum(0).to({x}.dtype), "
            'reduction="none")[:, None]'
        ),
        "the previous class": "{m}({x}) + F.embedding(F.pad({ids}[:-1], (1, 0)), {W})",
        "counts by class": "{x} / torch.bincount({ids}, minlength={C}).clamp(min=1)[{ids}][:, None]",
        "inverse of unique": "{m}({x}) * torch.unique({ids}, return_inverse=True)[1][:, None]",
        "isin": "{x} * torch.isin({ids}, {ids}[:1])[:, None]",
        "a bag with offsets": "F.embedding_bag({ids}, {W}, torch.arange({B}).clamp(max=1)) + {x}",
        "mixup": "{m}(0.7 * {x} + 0.3 * {x}.flip(0))",
        "nearest": "{x} + {m}({x})[(torch.cdist({x}.detach(), {x}.detach()) + 100 * torch.eye({B})).argmin(1)]",
    },
    either={
        "buckets": "{m}({x}) * torch.bucketize({x}.detach(), {r}.detach().sort().values)",
        "places in a sequence": "{m}({x}) * torch.searchsorted({r}.detach().sort().values, {x}.detach())",
        "a table of rows": "{x} + F.embedding({ids}, {W} * {r})",
        "a table of one row more": "{x} + torch.cat([{W}, {r}[None]])[{ids} + 1]",
        "ids of others": "{m}({x}) + F.embedding({o}.argmax(1), {W})",
        "one-hot of others": "{m}({x}) * F.one_hot({o}.argmax(1), {C})",
        "a loss by others": '{x} * F.cross_entropy({m}({x}), {o}.argmax(1), reduction="none")[:, None]',
        "weights of classes": (
            '{x} * F.nll_loss({x}.log_softmax(1), {ids}, {r}.detach().abs(), reduction="none")[:, None]'
        ),
        "a gather by others": "{x} * {m}({x}).gather(1, {o}.argmax(1, keepdim=True))",
        "a column of a sequence": "{x} * {r}[{ids}][:, None]",
        "a scatter by id": "{x}.scatter(1, {ids}[:, None], {o}[:, :1])",
        "digits": "{x} * torch.bucketize({o}.detach(), torch.arange(3.0))",
    },
)

FUNCTIONS: Table = texts(
    "functions",
    apart={
        "cumsum within": "{m}({x}).cumsum(1)",
        "cummax within": "{m}({x}.cummax(1).values)",
        "logcumsumexp within": "{x}.logcumsumexp(1)",
        "cumprod within": "{x}.sin().cumprod(1)",
        "a scan within": "scan(lambda c, a: (c + a, c * 1), {x}[:, 0] * 0, {x}.t())[1].t()",
        "a loop within": (
            "{z} = {x}\nfor _ in range(3):\n    {z} = torch.tanh({m}({z}) - {z}.mean(1, keepdim=True))\n{z}"
        ),
        "vmap over rows": "torch.vmap(lambda a: a.cumsum(0))({m}({x}))",
        "a state of columns": (
            "{z} = {x}[:, 0] * 0\nfor a in {x}.unbind(1):\n    {z} = torch.tanh({z} + a)\n{x} * {z}[:, None]"
        ),
        "gradient of a sum": "torch.func.grad(lambda a: a.sin().sum())({x})",
        "one by one": "torch.stack([{m}(a) for a in {x}])",
        "one by one, by split": "torch.cat([{m}(a) for a in {x}.split(1)])",
    },
    mixes={
        "cumsum": "{x}.cumsum(0)",
        "cummax": "{m}({x}.cummax(0).values)",
        "cummin's places": "{x} * {x}.cummin(0).indices",
        "logcumsumexp": "{x}.logcumsumexp(0)",
        "cumprod": "{x}.sin().cumprod(0)",
        "cumsum in place": "{m}({x}.clone().cumsum_(0))",
        "a scan": "scan(lambda c, a: (c + a, c * 1), {x}[0] * 0, {x})[1] + {x}",
        "a state over samples": (
            "{z} = {x}.new_zeros({C})\n"
            "{y} = []\n"
            "for a in {x}.unbind(0):\n"
            "    {z} = torch.tanh(a + {z})\n"
            "    {y}.append({z})\n"
            "torch.stack({y})"
        ),
        "trapezoid": "{x} * torch.cumulative_trapezoid(F.pad({x}, (0, 0, 1, 0)), dim=0)",
        "renorm": "{x}.renorm(2, 1, 0.5)",
        "a gradient of a square": "torch.func.grad(lambda a: a.sum().square())({x})",
        "vmap over columns": "torch.vmap(lambda a: a - a.mean(), 1, 1)({x})",
        "vmap that closes over all": "{x} * torch.vmap(lambda a: ({x} @ a).sum())({x})[:, None]",
        "a jacobian of all": "{x} + torch.func.grad(lambda a: a.exp().sum().log())({x})",
    },
    either={
        "a branch": "cond({s} > 0.5, lambda a: a.sin(), lambda a: a.cos(), ({x},))",
        "a branch's operand": ("cond(torch.arange({C}).sum() > 0, lambda a, c: a * c, lambda a, c: a - c, ({x}, {o}))"),
        "while_loop's state": (
            "while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a.sin() + 0.1), (torch.tensor(0), {o}))[1]"
        ),
        "a loop's bound": (
            "while_loop(lambda i, a: i < {s}.detach().abs().clamp(max=3), lambda i, a: (i + 1, a.sin()), "
            "(torch.tensor(0), {x}.detach()))[1] * {x}"
        ),
        "a scan's start": "scan(lambda c, a: (c + a, c * 1.0), {o}[:, 0] * 1.0, {x}.t())[1].t()",
        "vmap of two": "torch.vmap(lambda a, c: a * c.sum())({x}, {o})",
        "vmap that closes": "torch.vmap(lambda a: a * {r})({x})",
        "a derivative of a product": "torch.func.grad(lambda a: (a.sin() * {o}.detach()).sum())({x})",
        "vjp": "torch.func.vjp(lambda a: a.sin(), {x})[1]({o})[0]",
        "jacrev of a row": "torch.func.grad(lambda a: (a.square() * {r}).sum())({x})",
    },
)
