"""From recipes to plans: recipes, vocabularies, statistics, and the plans made from them."""
