"""The parameters over which every step is compared with its reference implementation."""

VARIANTS = [
    ("norm_balance", {}),
    ("norm_balance", {"strength": 0.3}),
    ("pact", {}),
    ("pact", {"core": 0.3, "own": 2}),
    ("pact", {"core": 0.5, "own": 0}),
    ("pico", {}),
    ("pico", {"factors": "given"}),
    ("rescale", {}),
    ("rescale", {"scale": 0.7}),
    ("svc", {}),
    ("svc", {"alpha": 1.0}),
]
