"""Pure tensor maths: no state, no model, no cache."""
