"""What scripts/ and tests/ share: references, comparisons, and reports of compiled programs. The package itself does
not import it.
"""
