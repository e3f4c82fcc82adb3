"""Long runs that can be trusted: the continual-learning driver, and the run folders that later drivers share."""
