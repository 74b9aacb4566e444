"""An inspection of experts before they are merged, and of what a merge made of them.

job       one streaming pass over all tensors, and a merged model that is inspected with them
result    what it measured, by layer
verdicts  what the numbers give away, and what a reader must not miss
"""
