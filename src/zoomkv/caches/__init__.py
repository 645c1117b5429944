"""Key-value caches: one file a policy, over two tiers."""
