"""Engines: how the nodes run. Same method, same numbers."""
