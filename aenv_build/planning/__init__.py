"""From a recipe to the graph of stages with their keys. Starts nothing."""
