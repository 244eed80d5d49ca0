"""Equations as functions of tensors: no networks, no nodes, no messages."""
