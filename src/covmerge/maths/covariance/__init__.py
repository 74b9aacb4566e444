"""Covariance estimates made from fine-tuning updates, and the sums of the closed form.

estimate   C_t from Δ_t: Gram, centred Gram, ridge, scale; the gate γ and its threshold
normal     Σ R_t C_t and Σ C_t, in d_in axes or in the row space of the updates;
           the collective structural prior, a rank-one term
"""
