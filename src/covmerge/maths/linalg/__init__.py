"""Dense linear algebra for the closed form: one solver or factorisation per file.

`auto` has the rules that choose between routes. Nothing here depends on what a covariance or an
expert is.
"""
