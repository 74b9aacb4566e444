"""Inspection of experts before a merge, and of a merged model beside its experts.

job       one streaming pass over all tensors of the base, the experts and a merged model
result    the measurements, by layer
verdicts  the findings that follow from the measurements
"""
