"""A minimal FSDP2 trainer for causal language models: start at `train.py`, which reads from top to bottom."""
