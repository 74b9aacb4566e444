"""From a recipe and headers to work: the rule of each tensor, the work items, and their costs."""
