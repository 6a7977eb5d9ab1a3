"""What a recipe is: its file, its models, its templates; errors with file:line:column."""
