"""What can be said of updates without merging them, and of a merged update without data.

sums       what adds up over the elements of a tensor: norms, cosines, signs, rounding
spectrum   singular values, ranks, leading input directions and how far two experts share them
rounding   what rounding of stored weights gives to an update
retention  what a merged update keeps of each expert, by its estimated covariance
table_rows which rows of a table of embeddings changed
"""
