"""The norms of gradients at the uses of parameters."""
