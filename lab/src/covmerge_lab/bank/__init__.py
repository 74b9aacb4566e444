"""The bank: many small sets of experts over many kinds of bases, and how every method does on each."""
