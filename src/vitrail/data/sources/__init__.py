"""Where pictures come from: folders, manifests, shards, arrays."""
