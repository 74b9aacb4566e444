"""Carry a plan out: read ahead, compute, write behind, within a memory budget.

inputs     what an item reads, and the updates it becomes
layer      the updates of some rows, and what methods make of them
inspect_rows  what an inspection says of some rows
worker     one function: the operands of some rows in, what becomes of them out
selection  the thresholds of global passes: the reduction of the work of counting
global_pass  passes before the merge: thresholds over all tensors
hashing    the hashes of the sources, taken while these are merged; the finished output, read once more
outputs    where results go: memory, or files at planned places; room on the disk
executor   what carries work out: batches in, what was done out
workers    how many processes a merge is worth
threads    the executor that reads, computes and writes in threads
processes  the executor whose processes open the sources for themselves
cluster    the executor of a Ray cluster
ranks      the executor of equal processes that were started by somebody else
run        one run: global passes, then what is not finished, and the journal
budget     bytes that may be alive at once
progress   what is called as a run advances: an object, a function, a class of bars
devices    which device a process computes on, and whether what is computed at once has room there
transfer   two pinned buffers through which what was read goes to a GPU while another item is computed
options    how a run is done: device, threads, memory, resume, progress
executors  which executor does it: a table by name
entries    items joined to tensors, tensors to totals; the methods' diagnostics, each as its own type
thread_count  cores that there are, and threads that torch computes with
"""
