"""Lightning modules, and what surrounds them."""
