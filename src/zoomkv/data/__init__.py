"""Traces and long texts: where they come from, and how they become batches."""
