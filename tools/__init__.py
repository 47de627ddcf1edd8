"""What a maintainer runs from the root of a clone: python -m tools.docs, … .older_jax, … .wheels. Part of the sdist, not of the wheels."""
