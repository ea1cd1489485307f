"""What scripts/ and tests/ share: references, comparisons, and reports of compiled programs.

It is not installed with `dflash_jax`, which does not import it.
"""
