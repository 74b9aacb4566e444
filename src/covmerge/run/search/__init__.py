"""Search for the values of a recipe that give the best scores."""
