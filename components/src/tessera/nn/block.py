"""What all blocks have in common: a forward pass, and a form that says how its operations run."""

from __future__ import annotations

from torch import nn

from tessera.nn.forms.plain import PLAIN, Form


class Block(nn.Module):
    """A module whose operations are those of its form; plain torch until ``use`` says otherwise."""

    form: Form = PLAIN


def use(module: nn.Module, form: Form) -> None:
    """Have ``module`` and every block below it run in ``form``; call it when their weights are in place."""
    for block in module.modules():
        if isinstance(block, Block):
            block.form = form
            form.prepare(block)
