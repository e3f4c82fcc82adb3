"""What the graph of an output says: nodes, uses of parameters, where the samples are."""
