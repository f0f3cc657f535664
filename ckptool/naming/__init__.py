"""Namings: what tensors are called and how they are fused."""
