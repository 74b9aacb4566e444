"""How good merged models are: suites of really trained experts, the papers' studies and their tables."""
