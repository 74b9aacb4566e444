"""Carry a plan out: read ahead, compute, write behind, within a memory budget.

inputs     reads the rows of an item and turns them into updates
layer      the updates of some rows, and the methods that merge them
inspect_rows  measures some rows for an inspection
worker     the function that computes results from the rows that were read
selection  counts magnitudes and finds the thresholds of global passes
global_pass  passes before the merge: thresholds over all tensors
hashing    hashes the sources while they are merged; reads the finished output once more
outputs    where results go: memory, or files at planned places; room on the disk
executor   the interface of executors: they take batches and yield finished items
threads    the executor that reads, computes and writes in threads
processes  the executor whose processes each open the sources
cluster    the executor of a Ray cluster
ranks      the executor of equal processes that another program started
run        one run: global passes, then the unfinished items, and the journal
budget     divides the memory of a run, and limits the bytes in flight
progress   reports how far a run is: to an object, a function, or a class of bars
devices    chooses the device of a process, and checks that each batch has room there
transfer   two pinned buffers that send rows to a GPU while another item is computed
options    how a run is done: device, threads, processes, memory, resume, progress
executors  the table of executors by name
entries    joins items into entries of tensors, and tensors into totals; types the methods' diagnostics
thread_count  the number of usable cores, and of the threads that torch computes with
"""
