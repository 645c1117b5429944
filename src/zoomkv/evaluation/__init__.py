"""What caches keep of a text, measured."""
