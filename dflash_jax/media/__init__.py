"""Images and videos: fetched, decoded and resized on the host, without JAX."""
