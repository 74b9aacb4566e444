"""What is to be done: recipes, vocabularies, statistics, and the plan made of them."""
