"""Why a norm can be believed: comparisons with plain autograd."""
