"""Measures of updates, without merging them, and of a merged update, without data.

sums       sums over the elements of a tensor: norms, cosines, signs, rounding
spectrum   singular values, ranks, leading input directions and how far two experts share them
rounding   the error that rounding of stored weights adds to an update
retention  the share of each expert that a merged update keeps, by its estimated covariance
table_rows which rows of a table of embeddings changed
"""
