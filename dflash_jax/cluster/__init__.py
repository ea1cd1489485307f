"""Several servers behind one address: replicas that Ray Serve runs, and an ingress that continues their streams."""
