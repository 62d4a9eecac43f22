"""Reads a model through hooks: which layers, where images enter, what activations and gradients make together."""
