"""Tasks that need no download, by name. Listing them imports none of them."""
