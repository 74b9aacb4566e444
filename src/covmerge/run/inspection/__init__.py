"""Inspection of experts before a merge, and of a merged model beside its experts."""
