"""Where things are in a sequence: summaries, paragraphs, semantic boundaries."""
