"""The towers and the weights: know names and the order of layers, never requests."""
