"""Device code: knows arrays, never the words "layer" or "request"."""
