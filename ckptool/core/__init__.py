"""What things are: boxes, tensors, checkpoints, plans, data positions. Standard library only."""
