"""Families of models: what their configs say, as a description of layers."""
