"""Blocks that every model family is made of, each with one forward pass.

A family describes its layers with a ``LayerSpec`` and its text tower with a ``TextSpec`` (``spec``, without
torch, so that configurations can hold them), and assembles modules from them. ``TextTower(spec)`` is a whole
text module. A vision tower is a ``PatchEmbedding``, a ``Stack`` of layers and a ``Merger`` or more, in a
module of the family::

    tower = load_text(spec, tensors, part="text.", dtype=dtype, device=device)    # loading
    tower = load_vision(make, tensors, part="vision.", normalisation=(mean, std), dtype=dtype, device=device)

``sources`` of a tower says which stored tensors a parameter is made of (``checkpoint.loading``): ``qkv_proj``
is q, k and v. The forward pass of a vision tower makes its rotation once for all layers::

    stream = self.patches(pixels, positions)     # Residual
    self.layers(stream, self.form.packed(cu_units, units), self.rotary(places), after)
    rows = self.merger(self.layers.output(stream, len(self.layers) - 1))

Rows are always flat, ``[tokens, width]``; which of them see each other is an object (``sequences``). Layers
read and add to a ``Residual``. How an operation runs is the form of its block (``forms``): plain torch until
``prepare`` chooses another one, FP8 after ``quantise``. What stands in ``kernels`` is imported by forms
alone.
"""
