"""What scripts/ and tests/ share: references, comparisons, and reports of compiled programs.

The remainder of the package does not import it.
"""
