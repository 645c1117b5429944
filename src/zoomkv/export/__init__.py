"""Small artifacts out of training checkpoints."""
