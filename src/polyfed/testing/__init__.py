"""Checks and oracles for methods: ours, and yours."""
