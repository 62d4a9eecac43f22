"""Extra passes through a model that leave no trace in it."""
