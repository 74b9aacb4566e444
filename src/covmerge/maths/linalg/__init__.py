"""Dense linear algebra for the closed form: one solver or factorisation a file.

`auto` holds the rules that choose between routes; nothing here knows what a covariance or an
expert is.
"""
