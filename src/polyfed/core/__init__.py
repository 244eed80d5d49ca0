"""The six concepts: node, message, phase, method, topology (and the engines that run them)."""
