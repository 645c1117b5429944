"""What is trained, and what training and caches share."""
