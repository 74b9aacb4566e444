"""An inspection of experts before they are merged, and of what a merge made of them.

compatibility  headers, configs
job            one streaming pass over all tensors
merged         a merged model that is inspected with them
result         what it measured, by layer
verdicts       what the numbers give away
findings       what a reader must not miss, as text
names          blocks and layers for people
"""
