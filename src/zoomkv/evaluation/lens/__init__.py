"""The cache lens: what a cache held of every token while an answer was written, on one page."""
