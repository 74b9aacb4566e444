"""A look at experts before they are merged, and at what a merge made of them.

compatibility  headers, configs
job            one streaming pass over all tensors
merged         a merged model that is looked at with them
result         what it measured, by layer
verdicts       what the numbers give away
findings       what a reader must not miss, in words
names          blocks and layers for people
"""
