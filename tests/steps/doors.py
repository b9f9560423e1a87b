"""Ways for values to travel unseen: writes, buffers, closures, globals, hooks, functions with an own backward."""

from __future__ import annotations

from tests.steps.builder import Builder, Value
from tests.steps.expected import Expected
from tests.steps.step import Step, Table
from tests.steps.texts import expand, rows, texts

WRITES: Table = texts(
    "writes",
    mixes={
        "each onto the next": "{z} = {x}.clone()\n{z}[1:] += {x}[:-1].clone()\n{m}({z})",
        "the last onto the others": "{z} = {x}.clone()\n{z}[:-1].add_({x}[-1:])\n{z}",
        "samples moved": "{z} = {x} * 1\n{z}[1:] = {z}[:-1].clone()\n{z}",
        "swapped": "{z} = {x}.clone()\n{z}[[0, -1]] = {z}[[-1, 0]]\n{m}({z})",
        "zeros that take moved samples": "{z} = torch.zeros_like({x})\n{z}[1:] = {x}[:-1]\n{z} + {x}",
        "addmm_": "{z} = torch.zeros({C}, {C})\n{z}.addmm_({x}.t(), {x})\n{m}({x} @ {z})",
        "through diagonal": "{z} = {x}.clone()\n{z}.diagonal().add_({x}.sum(0)[0])\n{m}({z})",
        "scatter_add_ over samples": (
            "{z} = {x}.clone()\n{z}.scatter_add_(0, torch.zeros_like({x}, dtype=torch.long), {x})\n{z}"
        ),
        "index_add_": "{z} = {x}.clone()\n{z}.index_add_(0, torch.tensor([0]), {x}.sum(0, keepdim=True))\n{z}",
        "out= of max": (
            "{z}, {y} = torch.empty({C}), torch.empty({C}, dtype=torch.long)\n"
            "torch.max({x}.detach(), 0, out=({z}, {y}))\n"
            "{x} - {z}"
        ),
        "out= of a product": (
            "{z} = torch.empty({C}, {C})\ntorch.mm({x}.detach().t(), {x}.detach(), out={z})\n{x} @ {z}"
        ),
        "through reshape": "{z} = {x}.clone()\n{z}.view(-1)[{C}:].add_({x}.reshape(-1)[:-{C}].clone())\n{z}",
        "masked_scatter_": "{z} = {x}.clone()\n{z}.masked_scatter_({x} > 0, {x}.flip(0))\n{z}",
    },
    apart={
        "a column": "{z} = {x}.clone()\n{z}[:, 0] += {x}[:, 1]\n{m}({z})",
        "columns, shifted": "{z} = {x}.clone()\n{z}[:, 1:] += {x}[:, :-1].clone()\n{z}",
        "scatter_add within": (
            "{z} = {x}.clone()\n{z}.scatter_add_(1, torch.zeros_like({x}, dtype=torch.long), {x})\n{z}"
        ),
        "index_add within": "{z} = {x}.clone()\n{z}.index_add_(1, torch.zeros({C}, dtype=torch.long), {x})\n{z}",
        "a constant": "{z} = torch.zeros({C})\n{z}[0] = 2.0\n{z}.add_(1)\n{x} * {z}",
        "an own mask": "{z} = {x}.clone()\n{z}[{x} > 0.3] = 0.1\n{z}.sin()",
    },
    either={
        "add_": "{z} = {x}.clone()\n{z}{at}.add_({r})\n{z}.sin()",
        "copy_": "{z} = {x}.clone()\n{z}{at}.copy_({r})\n{z} + {x}",
        "mul_": "{z} = {m}({x}).clone()\n{z}{at}.mul_({r})\n{z}",
        "clamp_": "{z} = {x}.clone()\n{z}{at}.clamp_(max={r})\n{z}",
        "fill_": "{z} = {x}.clone()\n{z}{at}.fill_({s})\n{z} + {x}",
        "lerp_": "{z} = {x}.clone()\n{z}{at}.lerp_({r}, 0.3)\n{z}",
        "addcmul_": "{z} = {x}.clone()\n{z}{at}.addcmul_({r}, {r})\n{z}",
        "zero_": "{z} = {x}.clone()\n{z}{at}.zero_()\n{z} + {x}",
        "assigned": "{z} = {x}.clone()\n{z}{br} = {r}\n{z} + {x}",
        "assigned and added": "{z} = {m}({x}).clone()\n{z}{br} += {r}\n{z}",
        "assigned and multiplied": "{z} = {x}.sin()\n{z}{br} *= {r}\n{m}({z})",
        "_foreach_add_": "{z} = {x}.clone()\ntorch._foreach_add_([{z}{at}], [{r}])\n{z}",
        "_foreach_mul_": "{z} = {x}.clone()\ntorch._foreach_mul_([{z}{at}], 2.0)\n{z} + {x}",
        "_foreach_ of a small one": "{z} = torch.ones({C})\ntorch._foreach_mul_([{z}], [{r}])\n{x} * {z}",
        "_foreach_ by a tensor": "{z} = torch.ones({C})\ntorch._foreach_mul_([{z}], {s}.detach() * 1.0)\n{x} * {z}",
        "_foreach_copy_": "{z} = torch.ones({C})\ntorch._foreach_copy_([{z}], [{r}.detach()])\n{x} * {z}",
        "out=": "{z} = torch.empty({C})\ntorch.add({r}.detach(), 0, out={z})\n{x} - {z}",
        "out= of all": "{z} = torch.empty_like({x})\ntorch.mul({o}.detach(), 2, out={z})\n{m}({x}) + {z}",
        "out= into a part": "{z} = torch.zeros(2, {C})\ntorch.sin({r}.detach(), out={z}[1])\n{x} + {z}.sum(0)",
        "zeros that take": "{z} = torch.zeros({C})\n{z} += {r}\n{x} - {z}",
        "zeros that take, through a view": "{z} = torch.zeros(2, {C})\n{z}[0].add_({r})\n{x} * {z}.sum(0)",
        "zeros that take, detached": "{z} = torch.zeros({C})\n{z}.detach().copy_({r}.detach())\n{x} - {z}",
        "a slot": "{z} = torch.zeros(1)\n{z}[0] = {s}\n{x} * {z}",
        "a slot of numbers": "{z} = torch.ones({C})\n{z}[1] = {n}\n{x} * {z}",
        "rows that take": "{z} = torch.zeros_like({x})\n{z}.copy_({o})\n{m}({z})",
        "rows that take, by index": "{z} = torch.zeros_like({x})\n{z}[{i}] = {x}\n{z}.sin() + {x}",
        "index_put_": "{z} = {x}.clone()\n{z}.index_put_(({i},), {o})\n{z}",
        "index_add_ of the index": "{z} = {x}.clone()\n{z}.index_add_(0, {i}, {x})\n{z}",
        "set through a view of a view": "{z} = {x}.clone()\n{y} = {z}.view(-1, {C}){at}\n{y} += {r}\n{y} *= 0.5\n{z}",
        "a custom op that writes": (
            "{z} = torch.zeros({C})\ntorch.ops.attacks.write({z}, {r}.detach() * 1.0)\n{x} + {z}"
        ),
        "a custom op that writes rows": (
            "{z} = torch.zeros_like({x})\ntorch.ops.attacks.write({z}, {o}.detach())\n{x} + {z}"
        ),
        "read before and after": "{z} = torch.zeros({C})\n{y} = {z}[None]\n{z}.add_({r})\n{x} * {y}",
        "a chunk": "{z} = torch.zeros(2 * {C})\n{z}.view(2, {C})[1].add_({r})\n{x} + {z}[{C}:]",
        "a row of an own buffer": "{state}.copy_({r}.detach())\n{x} - {state}",
        "a buffer that runs": "{state}.mul_(0.9).add_({r}.detach(), alpha=0.1)\n{x} - {state}",
        "a buffer by out=": "torch.sin({r}.detach(), out={state})\n{x} - {state}",
        "a buffer in part": "{state}[:1] = {s}.detach()\n{x} * ({state} + 1)",
        "a buffer's data": "{state}.data.add_({r}.detach())\n{x} + {state}",
    },
)

DOORS: Table = texts(
    "doors",
    either={
        "a closure": "{z} = {r}\n{y} = lambda a: a - {z}\n{y}({x})",
        "a closure that writes": "{z} = [{r}]\n{y} = lambda: {z}.append({z}[0] * 2)\n{y}()\n{x} - {z}[-1]",
        "a global": "STORE['value'] = {r}\n{x} - STORE['value']",
        "an attribute": "self.kept = {r} * 1.0\n{x} * self.kept",
        "a list": "{z} = [{x}, {r}]\n{z}[0] * {z}[1]",
        "a dict": "{z} = dict(a={x}, b={r})\n{z}['a'] + {z}['b']",
        "a tuple of calls": "(lambda *a, **k: a[0] * k['c'])({x}, c={r})",
        "batch_norm's mean": "F.batch_norm({x}, {r}.detach() * 1.0, {r}.detach().abs() + 0.5, {p}, None, False)",
        "layer_norm's weight": "F.layer_norm({x}, ({C},), {r} * 1.0)",
        "a weight times rows": "F.linear({x}, {W} * {r})",
        "a bias of rows": "F.linear({x}, {W}, {p} * {r}).tanh()",
        "a product of rows": "{x} @ torch.outer({r}, {r}).tanh()",
        "addmm's input": "torch.addmm({r} * 1.0, {x}, {W})",
        "prelu's weight": "F.prelu({x}, {r} * 1.0)",
        "a Function's argument": "Scaled.apply({x}, {r} * 1.0)",
        "a Function's saved value": "ScaledBackward.apply({m}({x}), {r}.detach() * 1.0)",
        "in a checkpoint": "checkpoint(lambda a: a - {r}, {x}, use_reentrant=False)",
        "beside a checkpoint": "checkpoint(lambda a, c: {m}(a) * c, {x}, {r}, use_reentrant=False)",
        "a checkpoint of others": "checkpoint({m}, {o}, use_reentrant=False)",
        "dropout's mask": "{x} * ({o} > 0.1)",
        "bmm of rows": "torch.bmm({x}[:, None], {r}.expand({B}, 1, {C}).mT * {x}[:, :, None]).squeeze(2) * {x}",
        "a mean under no_grad": "with torch.no_grad():\n    {z} = {r} * 1.0\n{m}({x} - {z})",
        "a module's call": "{m}({x}, ) * torch.sigmoid({r})",
        "masked by rows": "torch.where({r} > 0.2, {x}, {x}.cos())",
        "a row beside the columns": "torch.cat([{x}, {r}.expand({B}, -1)], 1)[:, 1 : {C} + 1]",
        "a grid": "{x} + torch.cdist({x}, {r}[None])",
        "bilinear": "F.bilinear({x}, {o}, {W}[None].expand({C}, -1, -1))",
        "einsum of rows": '{x} * torch.einsum("bi,i->b", {x}, {r})[:, None]',
        "tensordot": "{x} * torch.tensordot({x}, {r} * 1.0, 1)[:, None]",
        "qr of rows": "{x} @ torch.linalg.qr(torch.outer({r}, {r}).detach() + torch.eye({C}) * 9).Q",
        "an inverse": "{x} @ torch.linalg.inv(torch.outer({r}, {r}).detach().tanh() * 0.1 + torch.eye({C}))",
        "a matrix exponential": "{x} @ torch.matrix_exp(torch.outer({r}, {r}).tanh() / 10)",
        "a contiguous copy": "{x} * {r}.expand({B}, -1).contiguous()",
    },
    apart={
        "normalised": "F.layer_norm({m}({x}), ({C},))",
        "unit length": "F.normalize({m}({x}), dim=1, eps=0.1)",
        "a quantile": "{m}({x}) - {m}({x}).quantile(0.5, dim=1, keepdim=True)",
        "distances to a constant": "{m}({x}) + torch.cdist({m}({x}), torch.eye({C}) * 3)",
        "top two": "{x} * {m}({x}).topk(2, dim=1).values.sum(1, keepdim=True)",
        "an autograd.Function": "Twice.apply({m}({x}))",
    },
    mixes={
        "a Function that mixes": "{m}(Centred.apply({x}))",
        "a Function that mixes backward": "CentredBackward.apply({m}({x}))",
        "batch norm": "F.batch_norm({x}.repeat(2, 1), None, None, training=True)[: {B}]",
        "svd": "{x} + torch.linalg.svd({x}.detach(), full_matrices=False).S.sum()",
        "whitened": "{x} @ torch.linalg.inv({x}.t() @ {x} + torch.eye({C}))",
        "pinv": "{x} + torch.linalg.pinv({x}.detach()).t()",
        "contrastive": (
            "{x} * F.cross_entropy(F.normalize({x}, dim=1, eps=0.1) @ F.normalize({x}, dim=1, eps=0.1).t(), "
            "torch.arange({B}), reduction='none')[:, None]"
        ),
    },
)


def hooked(text: str, attach: str, expected: Expected) -> Step:
    """A module with a hook; the text is what the hook returns, `out` what it gets."""

    def build(b: Builder, v: Value) -> Value | None:
        x = rows(b, v)
        if x is None:
            return None
        module = b.module(f"nn.Linear({x.shape[1]}, {x.shape[1]})")
        code, _ = expand(b, text.replace("{x}", "out"), x, expected)
        b.declarations.append(f"{module}.{attach}({code})")
        return b.like(f"{module}({x.name})", x, learned=True)

    return Step("hooks", f"{attach} {text}", build, expected)


HOOKS: Table = [
    hooked("lambda m, a, out: out.tanh()", "register_forward_hook", Expected.APART),
    hooked("lambda m, a, out: out - out.mean(1, keepdim=True)", "register_forward_hook", Expected.APART),
    hooked("lambda m, a: (a[0].sin(),)", "register_forward_pre_hook", Expected.APART),
    hooked("lambda m, a, out: out - out.mean(0)", "register_forward_hook", Expected.MIXES),
    hooked("lambda m, a, out: out * a[0].abs().max()", "register_forward_hook", Expected.MIXES),
    hooked("lambda m, a, out: out * a[0].abs().max().item()", "register_forward_hook", Expected.MIXES),
    hooked("lambda m, a, out: out.roll(5, 0)", "register_forward_hook", Expected.DEPENDS),
    hooked("lambda m, a: (a[0] - a[0].mean(0),)", "register_forward_pre_hook", Expected.MIXES),
    hooked("lambda m, a: (a[0].flip(0),)", "register_forward_pre_hook", Expected.MIXES),
]
HOOKS += texts(
    "hooks",
    apart={"on a tensor": "{z} = {m}({x})\nwith_hook({z}, lambda g: g * 0.5)\n{z}.sin()"},
    mixes={
        "on a tensor, of the mean": "{z} = {m}({x})\nwith_hook({z}, lambda g: g - g.mean(0))\n{z}.sin()",
        "on a tensor, of the norm": "{z} = {m}({x})\nwith_hook({z}, lambda g: g / (1 + g.norm()))\n{z}.sin()",
    },
)
