"""Losses: pure functions on tensors."""
